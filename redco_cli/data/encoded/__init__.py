"""Examples as token ids: encoded once, cut to a length, and several in a row where a model can tell them apart.

In: a function from one example to 1-D arrays (a plugin's `encode_fn`), and examples of known length. Out: `Rows`, a
sequence that the loader reads like any examples, with a number of rows that is known before the first step; of examples
without a length `RowStream`, which makes such rows window after window (`windows`), or `TextStream` (`texts`).

Start with `encode`, which keeps on disk what it has encoded (`store` is its form there); where that takes long,
`parallel` has other processes do it (`child`). `packing` cuts what is too long and decides what shares a row; `rows`
puts the tokens of a row together when it is read.
"""
