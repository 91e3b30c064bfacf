"""How logical axes pass through loops and conditionals, and what takes arrays apart or joins them.

In: an equation and what is known of its operands. Out: the same of its results, with notes of what would move if a dim
were split. A rule registers itself when its module is imported. Start at `control_flow`; the rules of other primitives
are in `primitives` and `matrices` around this room.
"""
