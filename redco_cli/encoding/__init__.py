"""From the examples of a split to the rows that a loss reads: encoded once, cut, and packed where that can be.

In: examples, and a plugin with or without an `encode_fn`. Out: rows of 1-D arrays, or the examples themselves where the
plugin has none; and batches of either. Start at `rows`, then `collate`; `identity` says which examples are encoded
already.
"""
