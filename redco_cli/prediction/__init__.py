"""Predictions: every example exactly once and in order, continued where a killed prediction stopped.

In: a job, its placement, parameters, and examples. Out: predictions as JSON-able values (`Predictor.all`, which
evaluation uses too), or a JSON-lines file with one line per example (`write_predictions`, for `redco predict`).

Likewise the columns of a plugin's `prepare_fn`, of every example that a loss reads (`columns`).

Start with the docstring of `predict`, which says when a partial file is continued and when it is not. `prompt` makes an
example of one text, `target` a recipe of a model alone, which begins with `model/predict.yaml`.
"""
