"""Differential privacy of the training examples: the `privacy` section of a recipe, for any plugin.

In go the section, how many examples and steps there are, and the plugin's loss; out come which examples each step
draws (`sampling`), its clipped and noisy gradient (`gradient`, `convolutions`), and what a run spends (`accounting`).
All clipping, noise and accounting is that of jax-privacy and dp-accounting. Begin with `accounting`.
"""
