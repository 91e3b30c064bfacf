"""A base in four or eight bits: weights that are not updated, kept as codes and dequantised where they are used.

In: how a program uses each weight (`adapters.uses`), and `adapter.quantize` of a recipe. Out: parameters in which such
a weight is a `Quantized`, where they live, and functions of them.

Start at `leaf` (what is kept of a weight), then `program` (how it is used).
"""
