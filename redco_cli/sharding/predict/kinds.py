"""What kinds of primitives there are, as far as memory is concerned."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CALLS = _names(
    "jit pjit closed_call core_call eval_jaxpr remat remat2 checkpoint custom_jvp_call custom_vjp_call "
    + "custom_vjp_call_jaxpr custom_lin"
)
"""Run a program once: as if it stood there."""
VIEWS = _names(
    "reshape squeeze expand_dims copy copy_p stop_gradient optimization_barrier name pvary reduce_precision "
    + "sharding_constraint"
)
"""The result is the operand, seen in another way."""
CHEAP = _names(
    "add add_any sub mul neg max min select_n eq ne lt le gt ge and or xor not convert_element_type abs sign floor "
    + "ceil round clamp is_finite integer_pow square bitcast_convert_type shift_left shift_right_logical "
    + "shift_right_arithmetic nextafter real imag population_count clz one_minus_square"
)
"""Elementwise, and rather computed again than kept."""
EXPENSIVE = _names(
    "exp exp2 log log1p log2 expm1 tanh logistic erf erfc erf_inv div rem rsqrt sqrt cbrt pow sin cos tan asin acos "
    + "atan atan2 sinh cosh asinh acosh atanh lgamma digamma polynomial"
)
"""Elementwise, and computed once."""
ELEMENTWISE = CHEAP | EXPENSIVE
MOVES = _names("broadcast_in_dim iota pad slice concatenate stack transpose rev dynamic_slice gather empty")
"""Move or make elements: computed again like cheap ones."""
REDUCTIONS = _names("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin reduce")
PRODUCTS = _names("dot_general conv_general_dilated ragged_dot ragged_dot_general")
RESHAPED = VIEWS | _names("convert_element_type transpose slice concatenate dynamic_slice")
"""The result is the operand in another place or precision."""
SCATTERED = "psum_scatter"
"""A sum over devices, of which each keeps its part."""
