"""One decoder-only transformer for many families.

In comes a `DecoderConfig` (`config`): which parts it has, with no family's name in them. Out goes a `DecoderModel`
(`model`): logits, a loss that never holds all logits (`loss`), and text (`generate`). Nothing here knows what a
Hugging Face config looks like.

Start with `decoder`, the module from token ids to logits; a layer is a `block` of `attention` and an MLP (`layers`)
or `experts`. `positions` has rotary angles and ALiBi, `masks` who sees whom, `cache` the keys and values of earlier
tokens.
"""
