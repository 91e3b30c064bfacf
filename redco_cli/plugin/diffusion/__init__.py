"""Diffusion in discrete time, for plugins that draw images by it: what the noise does, and how it is undone.

In come betas or the name of a schedule, and a function that tells the image in a noisy one; out come noisy images, what
a network learns to predict of them, and images that nobody made. Begin with `schedules.py`; `samplers.py` has
DDIM and DPM-Solver++ as one recurrence, whose coefficients are known before anything is drawn.
"""

from redco_cli.plugin.diffusion.samplers import SOLVERS, Solver, coefficients, sample, trailing
from redco_cli.plugin.diffusion.schedules import Prediction, Schedule, clean_of, cosine, from_betas, target_of

__all__ = [
    "SOLVERS",
    "Prediction",
    "Schedule",
    "Solver",
    "clean_of",
    "coefficients",
    "cosine",
    "from_betas",
    "sample",
    "target_of",
    "trailing",
]
