"""Adapters: small matrices beside the weights of a model, which are trained in their place.

In: a loss and abstract parameters, and what a recipe says in `adapter`. Out: a function of parameters and adapters, and
the adapters themselves as one more model of the run; the model that they adapt is never updated.

Start at `uses` (how a program uses each weight), then `low_rank` (the path beside a weight's own product) and
`products` (how that crosses devices); `quantized` keeps that weight in four or eight bits. `peft` reads adapters of
other libraries: `stored` checks their files, `diffusers` knows the one file of a U-Net's.
"""
