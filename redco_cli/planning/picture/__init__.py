"""The report of a plan as one SVG picture: `redco inspect-sharding --svg FILE`.

In: a `planning.report.Report`. Out: an SVG document that refers to nothing outside itself.

Start with `svg.render_svg`: heading, legend, blocks, memory. `blocks` orders the groups of parameters from the model's
input to its output, repeated layers once; `tiles` draws each group as a rectangle of its bytes, cut where it is split.
"""
