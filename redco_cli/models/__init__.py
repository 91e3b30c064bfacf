"""What is trained: from the `model` section of a recipe to a model and its parameters.

In comes a hub id, a directory, a preset's name or an inline config. Out goes an object behind the interface
`plugin.contract.Model` (abstract parameters, init, apply, generate), and parameters born in their shards.

Start with `resolve`: it reads a config (`config`) and takes one of two implementations, our own decoder (`decoder`,
for what `hf_config` reads with a file of `families`) or a Flax class of transformers (`flax`). `initial` gives the
first parameters, from the files of a checkpoint (`weights`) or fresh ones. A plugin's own Flax module comes by
`own_module`; `presets` has configs of well-known sizes, and `example_inputs` a batch that every model takes.
"""
