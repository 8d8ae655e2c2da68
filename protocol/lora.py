"""Runs that train low-rank adapters of a base whose weights never change (Hu et al. 2021; docs/spec/lora.md).

A matrix W [out, in] of the base gets A [rank, in] and B [out, rank]: the module computes W x + alpha / rank * B (A x).
The chain has the adapters alone, under the names of PEFT's files.
"""

from collections.abc import Sequence
from math import prod
from typing import Annotated, ClassVar, Final

from pydantic import Field

from protocol import limits
from protocol.encoding import Ascending, Record
from protocol.errors import ChainError
from protocol.identity.signing import Digest
from protocol.objects import ObjectRef

PREFIX: Final = "base_model.model."
"""With what the names of PEFT's tensors begin, before the name of the module."""

DOWN: Final = ".lora_A.weight"
UP: Final = ".lora_B.weight"
_DTYPE: Final = "BF16"
_ITEM_BYTES: Final = 2


class LoraSpec(Record):
    """The base of a run, and where its adapters are (fields: docs/spec/lora.md)."""

    kind: ClassVar[str] = "lora"
    rank: Annotated[int, Field(ge=1, le=limits.MAX_LORA_RANK)]
    alpha: Annotated[float, Field(gt=0.0, le=limits.MAX_LORA_ALPHA)]
    targets: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.]{0,99}$")], ...],
        Field(min_length=1, max_length=limits.MAX_LORA_TARGETS),
        Ascending,
    ]
    base: Digest
    shards: Annotated[tuple[ObjectRef, ...], Field(min_length=1, max_length=limits.MAX_ANCHOR_SHARDS)]

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / self.rank

    @property
    def base_bytes(self) -> int:
        """Bytes of the base's files."""
        return sum(shard.size for shard in self.shards)

    def is_target(self, module: str) -> bool:
        """Return whether a module has an adapter, if it is a matrix: as PEFT decides, by the end of its name."""
        return any(module == target or module.endswith(f".{target}") for target in self.targets)

    def check_table(self, tensors: Sequence[tuple[str, str, tuple[int, ...]]], place: str) -> None:
        """Check, before any tensor is fetched, that a version's table has adapters alone: ChainError if one is none of
        the run's, or has no counterpart, or if they are larger than adapters of the base can be.
        """
        names = {name for name, _, _ in tensors}
        for name, dtype, shape in tensors:
            end = DOWN if name.endswith(DOWN) else UP
            module = name.removeprefix(PREFIX).removesuffix(end)
            if name != f"{PREFIX}{module}{end}" or not self.is_target(module):
                raise ChainError("a tensor that is none of the run's adapters", f"{place}, {name}")
            if f"{PREFIX}{module}{UP if end == DOWN else DOWN}" not in names:
                raise ChainError("half an adapter", f"{place}, {name}")
            if dtype != _DTYPE or len(shape) != 2 or shape[0 if end == DOWN else 1] != self.rank:
                raise ChainError("not an adapter of the run's rank, or not in BF16", f"{place}, {name}")
        # rank <= min(in, out) of each matrix, so that rank * (in + out) <= 2 * in * out
        if sum(_ITEM_BYTES * prod(shape) for _, _, shape in tensors) > 2 * self.base_bytes:
            raise ChainError("adapters that are larger than the base allows", place)
