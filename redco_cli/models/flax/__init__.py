"""The Flax classes of transformers 4 behind the interface of every named model.

In comes a transformers config and a task. Out goes a `HfFlaxModel` (`model`) that hides how the classes differ in being
called. Start with `model`. `refusals` is what they are known to get wrong, by setting, `repairs` what a newer JAX broke
in them and is mended, `limits` which inputs they take, `generation` which settings of it they follow, and `naming` what
their parameters are called in PyTorch.
"""
