"""How predictions are scored against references: for `loss_fn` of a plugin, and for its `metric_fn`.

In: predictions and references of all examples, in the same order. Out: numbers as the field defines them.
`losses` has the cross-entropy of logits, `texts` compares texts, `labels` classes and numbers; `parts` has them all.
"""
