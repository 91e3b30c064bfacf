"""Several sources as one stream, each of its examples as often as the weight of its source says.

In: streams that can be opened at a bookmark, with a weight each. Out: `MixedStream`, which is one more such stream.

Start with `streams`. `lengths` estimates how long a source is, by which it is spread over an epoch; `choice` draws some
of the examples of a source by their numbers alone.
"""
