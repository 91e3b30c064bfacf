"""Recipes: what a run is, as a typed document. Imports neither JAX nor any model library."""
