"""Weights whose products are taken apart, or are products of what was joined: a program of their pieces.

    split(x @ w)               x @ w1, x @ w2, ..       queries, keys and values, of sizes that differ
    concatenate(a, b) @ w      a @ w1 + b @ w2          what skips layers, joined with what comes out of them

What is taken apart or joined cannot stay split over `tensor` in contiguous blocks: x @ w lies on other devices than its
parts. Those of the products on the right do. A weight is kept as it is, and taken apart where it is used.

In: a program that was read. Out: what it is of pieces, where it takes any of its weights apart, and how. Start at
`reading` (which weights are taken apart, and the axes of their pieces), then `rules` (the program of pieces) and
`arrays` (a weight that is taken apart, and what is not joined yet). Whether pieces are used: `decide`.
"""
