"""The sections of a recipe that have a page of their own.

Each is a pydantic model whose docstrings are the documentation of its keys, in editors too. `redco_cli.recipe.schema`
puts them together; start there.
"""
