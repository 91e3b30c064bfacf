"""Whether a loss depends on how its batch is cut into micro-batches.

In: a job with its plugin. Out: what in the trace of its `loss_fn` depends on the cut, with the line of the plugin
(`findings`); and the loss of a first micro-batch in one piece and in two, computed and compared (`proof`).

Start with `findings`. It traces the loss and has `walk` go through it, which says of each array what the rows of the
batch come to in it: a `Value` (`values`), by the rules of `arithmetic` and `views`.
"""
