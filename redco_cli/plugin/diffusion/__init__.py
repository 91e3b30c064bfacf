"""Diffusion in discrete time, for plugins that draw images by it: what the noise does, and how it is undone.

In come betas, the name of a schedule or a config of diffusers, and a function that tells the image in a noisy one; out
come noisy images, what a network learns to predict of them, and images that nobody made. Begin with `schedules.py`;
`samplers.py` has DDIM and DPM-Solver++ as one recurrence, whose coefficients are known before anything is drawn,
`multistep.py` PNDM, and `settings.py` what diffusers' `scheduler_config.json` means by them.
"""

from redco_cli.plugin.diffusion.samplers import SOLVERS, Solver, coefficients, sample, trailing
from redco_cli.plugin.diffusion.schedules import (
    Prediction,
    Schedule,
    clean_of,
    cosine,
    from_betas,
    linear,
    scaled_linear,
    snr_weight,
    target_of,
    without_signal,
)
from redco_cli.plugin.diffusion.settings import Drawn, Scheduler, load_scheduler, read_scheduler

__all__ = [
    "SOLVERS",
    "Drawn",
    "Prediction",
    "Schedule",
    "Scheduler",
    "Solver",
    "clean_of",
    "coefficients",
    "cosine",
    "from_betas",
    "linear",
    "load_scheduler",
    "read_scheduler",
    "sample",
    "scaled_linear",
    "snr_weight",
    "target_of",
    "trailing",
    "without_signal",
]
