"""Chips as data: what a device holds, computes and moves, and which devices a program is for.

In: what is typed for `--target`, such as `h100:8` or `2*v6e:16x16`, or the devices of this machine. Out: a `Target`,
which whatever depends on the platform asks: the attention kernel, what is predicted, where a mesh crosses slow links.

Start at `table` (one entry for each chip, with its sources), then `target`; `speeds` has what programs reach of it.
"""
