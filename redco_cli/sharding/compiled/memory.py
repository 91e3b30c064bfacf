"""What a compiled step says of its memory, cut as `memory` cuts its prediction.

`jax.stages.Compiled.memory_analysis()` of a step with donated state gives, on one device,

    argument_size_in_bytes      parameters + optimizer + batch
    alias_size_in_bytes         parameters + optimizer: outputs that take the place of arguments
    output_size_in_bytes        the same, and what is returned beside it: losses, counts
    temp_size_in_bytes          gradients + gathered + copies + activations + logits, at the worst moment

A compiler does not tell the kinds of temporary memory apart. Copies of donated arguments are read from the compiled
text; gradients have the size of their parameters; what is gathered has to be known; activations are what is left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from redco_cli.sharding.compiled.hlo import parse, size_in_bytes


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes on one device.

    Attributes:
        arguments: parameters, optimizer state and batch.
        aliased: outputs in the place of arguments.
        outputs: all outputs.
        temporary: everything else.
        gradients: part of it.
        gathered: part of it: parameters put together, or cast, where they are used.
        copies: part of it: donated arguments that are copied before their place is written.
    """

    arguments: int
    aliased: int
    outputs: int
    temporary: int
    gradients: int
    gathered: int
    copies: int

    @property
    def activations(self) -> int:
        """What is left of temporary memory, logits included."""
        return self.temporary - self.gradients - self.gathered - self.copies

    @property
    def total(self) -> int:
        """Everything at once."""
        return self.arguments + self.outputs - self.aliased + self.temporary


def compiled_memory(compiled: Any, gradients: int, gathered: int = 0) -> CompiledMemory | None:
    """The memory of a compiled train step; None when its backend does not say.

    Args:
        compiled: a `jax.stages.Compiled` train step that donates its state.
        gradients: bytes of all gradients on one device: those of the trained parameters.
        gathered: bytes of parameters that are gathered or cast at the worst moment, as predicted.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return CompiledMemory(
        arguments=stats.argument_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        gradients=gradients,
        gathered=gathered,
        copies=_copies(compiled.as_text()),
    )


def _copies(text: str) -> int:
    """Bytes of donated arguments that the program copies as a whole."""
    header = text.partition("\n")[0]
    donated = set(re.findall(r"\{[\d, ]*\}: \((\d+),", header))
    module = parse(text)
    entry = module.computations[module.entry]
    arguments = {name for name, one in entry.items() if one.opcode == "parameter" and one.operands[0] in donated}
    return sum(
        size_in_bytes(one.type) for one in entry.values() if one.opcode == "copy" and one.operands[0] in arguments
    )
