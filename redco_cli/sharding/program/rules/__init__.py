"""How logical axes pass through primitives that hold programs, or take arrays apart and join them.

In: an equation and what is known of its operands. Out: the same of its results, with notes of what would move if a dim
were split. A rule registers itself when its module is imported. Start at `programs`; those of other primitives are in
`primitives` and `matrices` around this room.
"""
