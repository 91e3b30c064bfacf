"""Recipes: what a run is, as a typed document. Imports neither JAX nor any model library.

In: a YAML file or the name of a shipped recipe, environment variables, and `key=value` overrides. Out: a
`LoadedRecipe`: the typed, frozen `Recipe` and where each of its values came from, or a `RecipeError` that names every
mistake with its line.

Start with `schema`: every key with its type, unit and default (`section` is the base of all sections, `devices` those
about meshes, `durations` lengths such as `5%`). `load` merges the sources, `yaml12` reads YAML, `explain` words the
mistakes, `redaction` hides in all that is written what `secrecy` calls a secret. `paths` makes relative paths absolute;
`shipped` and `starter` find and copy the recipes that come with redco.
"""
