"""Plugins: what they are, how they are found, and how their functions are called.

In: `plugin.module` and `plugin.options` of a recipe. Out: a `LoadedPlugin` whose functions exist and take the right
arguments, and calls of them whose results are checked and whose exceptions name the plugin's own line.

Start with `contract`: the functions, the words of this project, and everything that a plugin author imports besides
`parts`, the building blocks that the built-in plugins are made of. `load` finds a plugin and checks it, `calls` calls
its functions, `guard` turns what they raise into errors with a place, `examples` does so for each example it gives.
`chat` is for plugins that read conversations.
"""
