"""The `adapter` section: small matrices that are trained beside weights that stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, create_model, model_validator

from redco_cli.recipe.section import Fraction, Positive, Section, Strings, contradiction

Share = Annotated[float, Field(gt=0)]
TAKEN = frozenset({"type", "rank", "alpha", "rslora", "targets", "rank_pattern", "alpha_pattern", "modules_to_save"})
"""The keys that `from` gives."""
_FROM = """An adapter to begin with: a directory of PEFT's files, the output directory of a run, of which the newest
whole checkpoint counts, or one `checkpoint-<step>` in it. `type`, `rank`, `alpha`, `rslora`, `targets`, the patterns
and `modules_to_save` are as there, and need not be given. Searched from the recipe's folder, then the working
directory.
"""


class AdapterSection(Section):
    """An adapter of `model`, which is not updated itself; checkpoints hold the adapter alone."""

    type: Literal["lora", "dora"] = "lora"
    """`lora`: a low-rank path beside each weight; `dora`: and a magnitude for each of its outputs."""
    rank: Positive = 16
    """Width of the path."""
    alpha: Share | None = None
    """What the path makes is multiplied by alpha / rank; default: twice the rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead."""
    dropout: Fraction = 0.0
    """Share of the path's input that is dropped in training."""
    targets: Literal["auto", "all_linear"] | Strings = "auto"
    """Which weights: `all_linear` is every one that is multiplied with activations, but for those that nothing follows
    (a head, a router); `auto` is the same today. Or regular expressions, each of which must match whole paths."""
    rank_pattern: dict[str, Positive] = Field(default_factory=dict)
    """Regular expression of whole paths to another rank."""
    alpha_pattern: dict[str, Share] = Field(default_factory=dict)
    """Regular expression of whole paths to another alpha."""
    modules_to_save: Strings = ()
    """Regular expressions of whole paths that are trained themselves: a new head."""
    base_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type in which the parameters that are not updated are kept; `auto` is `model.dtype`."""
    quantize: Literal["int8", "nf4"] | None = None
    """Keep of each weight that `all_linear` means, adapted or not, codes of 8 or 4 bits and a float32 scale for each 64
    inputs (QLoRA, without double_quant); embeddings, norms, routers and the head stay in `base_dtype`."""

    @model_validator(mode="after")
    def _consistent(self) -> AdapterSection:
        if isinstance(self.targets, tuple) and not self.targets:
            raise contradiction("adapter.targets", "an empty list adapts nothing", "leave it out, or name weights")
        return self

    @property
    def source(self) -> str | None:
        """What `from` names; None for a fresh adapter."""
        source: str | None = getattr(self, "from", None)
        return source


if not TYPE_CHECKING:  # `from` is a word of Python, which the body of a class cannot have for a name
    _SOURCE = {"from": (str | None, Field(default=None, description=" ".join(_FROM.split())))}
    AdapterSection = create_model(
        "AdapterSection", __base__=AdapterSection, __doc__=AdapterSection.__doc__, __module__=__name__, **_SOURCE
    )
