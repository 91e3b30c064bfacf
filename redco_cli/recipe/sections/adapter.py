"""The `adapter` section: small matrices that are trained beside weights that stay as they are."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from redco_cli.recipe.section import Fraction, Positive, Section, Strings, contradiction

Share = Annotated[float, Field(gt=0)]
TAKEN = frozenset(
    {"type", "rank", "alpha", "rslora", "targets", "rank_pattern", "alpha_pattern", "modules_to_save", "init"}
)
"""The keys that `from` gives."""
_FROM = """An adapter to begin with: a directory of PEFT's files, or for a U-Net of diffusers', the output directory of
a run, of which the newest whole checkpoint counts, or one `checkpoint-<step>` in it. `type`, `rank`, `alpha`, `rslora`,
`targets`, the patterns and `modules_to_save` are as there, and need not be given. Searched from the recipe's folder,
then the working directory.
"""
_NEARLY = "pissa_niter_"


def _known_init(given: str) -> str:
    if given in ("default", "pissa") or re.fullmatch(rf"{_NEARLY}[1-9][0-9]{{0,2}}", given):
        return given
    raise ValueError("one of default, pissa, pissa_niter_N (N iterations, such as pissa_niter_16) is expected")


Init = Annotated[str, AfterValidator(_known_init)]


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
    init: Init = "default"
    """How the path begins: by `default` it adds nothing, A being random; with `pissa` (arXiv 2404.02948) A and B are
    the principal part of the weight, which is subtracted beside it, so that at first it adds nothing either;
    `pissa_niter_16` finds that part faster and nearly, in 16 iterations."""
    lr_ratio: Share | None = None
    """LoRA+ (arXiv 2402.12354): the learning rate of B, and of magnitudes, is so many times `train.learning_rate`, that
    of A. Tables of which rows are looked up have 1e-6 at the peak, as in PEFT. Default: one rate for all."""
    base_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type in which the parameters that are not updated are kept; `auto` is `model.dtype`."""
    quantize: Literal["int8", "nf4"] | None = None
    """Keep of each weight that `all_linear` means, adapted or not, codes of 8 or 4 bits and a float32 scale for each 64
    inputs (QLoRA, without double_quant); embeddings, norms, routers and the head stay in `base_dtype`."""

    @model_validator(mode="after")
    def _consistent(self) -> AdapterSection:
        if isinstance(self.targets, tuple) and not self.targets:
            raise contradiction("adapter.targets", "an empty list adapts nothing", "leave it out, or name weights")
        if self.begins_with_weight and self.dropout:
            problem = f"adapter.init is {self.init}: a share of the model's own weights would be dropped"
            raise contradiction("adapter.dropout", problem, "leave it out, or set adapter.init: default")
        if self.begins_with_weight and self.quantize:
            problem = (
                f"adapter.init is {self.init}, which begins with a part of the weights themselves, not of their codes"
            )
            raise contradiction("adapter.quantize", problem, "set adapter.init: default")
        return self

    @property
    def source(self) -> str | None:
        """What `from` names; None for a fresh adapter."""
        source: str | None = getattr(self, "from", None)
        return source

    @property
    def begins_with_weight(self) -> bool:
        """Whether the path begins with a part of the weight."""
        return self.init != "default"

    @property
    def iterations(self) -> int | None:
        """In how many iterations that part is found nearly; None where it is found exactly."""
        return int(self.init.removeprefix(_NEARLY)) if self.init.startswith(_NEARLY) else None


if not TYPE_CHECKING:  # `from` is a word of Python, which the body of a class cannot have for a name
    _SOURCE = {"from": (str | None, Field(default=None, description=" ".join(_FROM.split())))}
    AdapterSection = create_model(
        "AdapterSection", __base__=AdapterSection, __doc__=AdapterSection.__doc__, __module__=__name__, **_SOURCE
    )
