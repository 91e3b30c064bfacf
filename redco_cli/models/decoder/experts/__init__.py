"""An MLP for each token among many: every token reaches all the experts that its router chose, none is dropped.

How many tokens an expert gets is known only when the program runs, and shapes must be known before. So an expert has
room for somewhat more than its even share of each row's tokens. Where one gets more, a branch that is usually not taken
computes those that are left: with more room, and at last every expert all tokens, those that did not choose it counting
nothing. What is usual stands outside of any branch, where compilers move weights and gradients beside it. Rows stay by
themselves, so that a batch that is split over devices stays where it is. `jax.lax.ragged_dot` does the same work with
any distribution on TPU, and elsewhere takes X copies of the tokens.

Large experts compute in up to four groups. Where weights are split over devices, compilers gather those of one group
beside the products of another, and scatter gradients so. The backward pass computes again, group by group, what tokens
are between the projections.

What an expert makes of a token is weighted before the last projection: then nobody needs the result of that for the
gradient of the shares, and the backward pass does not compute it again.

Where F is split over `tensor`, each device has a part of what every expert makes of a token. A compiler sums the parts
as they come out of the product, of each expert's room: of two among eight experts with room for twice their share four
rows for a token, and as many in the backward pass. Here a device adds up what it has for each token first.

Shapes: B batch, S sequence, E hidden size, X experts, N experts per token, C tokens an expert has room for, F width,
T devices along `tensor`.

Start with `layer`: the module and its router. `mix` computes.
"""
