"""What families have in common.

`family` says what a family is, and how fused tensors are cut. `settings` is a config as it is read: what nobody read,
and is not as usual, is refused by name. `rope` reads rotary positions with every kind of scaling, `transformers5`
those that newer files spell in other keys. `lineage` has what Llama's descendants share, `gpt` what the families
before it do. Start with `family`. In come settings, out go the options of a `DecoderConfig`.
"""
