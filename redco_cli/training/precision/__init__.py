"""What training in 16 bits needs besides the arithmetic of a step.

`loss_scale` keeps gradients within the range of float16: a scale, applied to each micro-batch's loss and taken off its
gradient, and how it follows what overflows. bfloat16 has the range of float32 and needs nothing.
"""
