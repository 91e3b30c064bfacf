"""Rows that a program looks up by number: in tables, or in the examples themselves.

In: equations and programs. Out: which of them look rows up and how; and the same program, that looks rows up before it
computes with them. Start at `lookups`, then `first`, with `tables`.
"""
