"""From the files of a checkpoint to parameters in their shards, without torch.

In come a model with abstract parameters and a directory of safetensors (or Flax msgpack). Out go arrays, each
device's shard read by itself, and what did not fit. Start with `load`. `files` opens a checkpoint, `table` says which
tensors of a family make up which parameters of the decoder, `decoder` and `flax` match them for the two
implementations, `fit` is what such a match comes to, and `shards` fills arrays piece by piece.
"""
