"""The code of a plugin as digests, by which a run that continues knows whether it is still the same code.

In: a loaded plugin. Out: a digest of each definition that its training functions reach, by file and name. Start with
`digests`, which says what counts; `reach` follows names from definition to definition; `syntax` reads one file. Beside
it: `draws`, what this code may not do while it is traced.
"""
