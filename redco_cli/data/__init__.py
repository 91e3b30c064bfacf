"""Examples: where they come from, in which order they are read, and how they become batches.

In: the `data` section of a recipe, or what a plugin's `load_examples` returns. Out: dicts of numpy arrays, the rows of
this process only, for training (endless, shuffled), evaluation (each example once) and prediction (one batch size).

Start with `loader`: the order of examples, and threads that read batches ahead of the device. `source` opens files,
saved datasets and the Hugging Face hub through `datasets` (`files`, `reader`, `jsonl` find and read them, and tell what
is damaged; `verbatim` keeps text text, `places` says where an example is from). `collate` makes a batch of examples,
`batch` says which rows a process collates, `examples` what an example is. `stream` is the order of data
without a length and how it is resumed; `resumable` opens such data at a bookmark, `mixed` makes one of several.
"""
