"""What is written down of a run while it trains.

In: metrics of steps and evaluations, and the time they took. Out: `metrics.jsonl`, `loss.png`, and copies of every
record in TensorBoard or Weights & Biases.

Start with `metrics`: `Meter` measures speed, `Recorder` writes the file and hands each record to the trackers of
`sinks`. `plot` draws the picture from the file, and `runs` reads what many runs have left behind.
"""
