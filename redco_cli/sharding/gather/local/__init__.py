"""Weights whose gradients each device adds up by itself, before they move: once, or those of what is small.

In: an equation of a program, and parameters in shards that it uses. Out: what stands for them, until a product uses it.
Start at `composed` (weights that are made of smaller ones), then `loops` (weights that every iteration of a loop uses)
and `shared` (weights that are used in several places). What the first two hand on is a `Repeated`, of the room around.
"""
