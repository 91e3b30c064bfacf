"""Causal attention on GPUs where cuDNN's would need a mask, or has no form: kernels of Pallas, compiled by Triton.

cuDNN is told an order and a window, and is faster with these. Texts that share a row, padding between windows and ALiBi
it takes as a bias of every score; bounded scores and sinks it does not have. These kernels read a number of each token
instead, and leave out blocks in which no token sees another. Start with `attend`.

Sources: FlashAttention-2 (arXiv 2307.08691), for the loops and what is kept for the backward pass; sizes of the blocks
as in Triton's tutorial of it (python/tutorials/06-fused-attention.py), smaller for wide heads. Sinks as in gpt-oss:
they take a share of the softmax and give nothing.
"""
