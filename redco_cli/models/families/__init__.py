"""One file per family, or close lineage, of decoders in transformers.

A file has, from top to bottom, what its tensors are called, how its `config.json` becomes a `DecoderConfig` and what
is refused, and `FAMILIES`: for each model type these pieces, a tiny example, and variants of it. To add a family, add
a file: `registry` finds it, and with it messages, `redco inspect-sharding --list` and the tests of parity, loading
and export. In come the settings of a config, out go the options of a `DecoderConfig` (see `hf_config` beside this
folder) and a table of names. Start with `llama`, then `gemma`; what several families have in common lies in `shared`.
"""
