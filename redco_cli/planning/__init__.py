"""Dry runs: what a recipe will do, before it does it."""
