"""Difficulty: the table by which each version's groups draw the kind of their problem (docs/spec/difficulty.md).

Each validator counts in its sealed summaries, for each stratum of the task's problems, the groups that it accepted and
those of them that are uneven: whose rewards are not all equal, so that a policy can learn from them. From the newest
counts of some validators follows the table that the trainer signs with a version. Everybody computes it again. All
arithmetic is in whole numbers, so that every node computes the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import isqrt
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, Field, model_validator

from protocol import limits
from protocol.encoding import Line, Record, Window, ascending_by
from protocol.environments.record import SHARES
from protocol.identity.signing import Digest, Key

GROUP: Final = 1_000_000
"""Counts are in millionths of a group."""

_PRIOR: Final = 4 * GROUP  # uneven groups that each stratum is taken to have had before anything was counted

Share = Annotated[int, Field(ge=1, le=SHARES)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]


def _of_groups(counts: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    if any(uneven > groups for groups, uneven in counts):
        raise ValueError("more uneven groups than groups")
    return counts


Counts = Annotated[
    tuple[tuple[Count, Count], ...], Field(min_length=2, max_length=limits.MAX_STRATA), AfterValidator(_of_groups)
]
"""(groups, uneven groups) of each stratum, in millionths of a group; what is older counts less."""


class Stratum(Record):
    """A kind of problems, with the share of all training problems that it has without a table, in millionths."""

    kind: ClassVar[str] = "stratum"
    name: Annotated[Line, Field(max_length=limits.MAX_STRATUM_CHARS)]
    ppm: Share


class DifficultySpec(Record):
    """How the tables of a run are computed (fields: docs/spec/difficulty.md)."""

    kind: ClassVar[str] = "difficulty-rule"
    strata: Annotated[tuple[Stratum, ...], Field(min_length=2, max_length=limits.MAX_STRATA), ascending_by("name")]
    floor_ppm: Annotated[int, Field(ge=0, lt=SHARES)]
    decay: Annotated[int, Field(ge=0, le=990_000)]

    @model_validator(mode="after")
    def _whole(self) -> "DifficultySpec":
        if sum(stratum.ppm for stratum in self.strata) != SHARES:
            raise ValueError(f"shares of strata that do not add up to {SHARES}")
        return self

    @property
    def floors(self) -> list[int]:
        """The least share of each stratum, in millionths."""
        return [max(1, stratum.ppm * self.floor_ppm // SHARES) for stratum in self.strata]

    def shares(self, ledgers: Sequence[Counts]) -> tuple[int, ...]:
        """Return the share of each stratum, in millionths, that follows from the counts of validators.

        A stratum's usefulness is the part of its groups that are uneven; of the validators' values the median counts,
        the lower one of two, so that fewer than half of them move it only within the values of the others. It counts
        beside the root of its own share, which makes the mean error least where each falls as one over its groups.
        """
        weights = [stratum.ppm for stratum in self.strata]
        for place, ppm in enumerate(weights if ledgers else ()):
            values = sorted(
                (uneven + _PRIOR) * SHARES // (groups + _PRIOR) for groups, uneven in (item[place] for item in ledgers)
            )
            weights[place] = isqrt(ppm * SHARES) * max(1, values[(len(values) - 1) // 2]) ** 5
        floors = self.floors
        rest, total = SHARES - sum(floors), sum(weights)
        # Differences of rounded sums: they add up to the rest, whatever is rounded.
        ends = [rest * end // total for end in accumulate(weights, initial=0)]
        return tuple(floor + after - before for floor, (before, after) in zip(floors, pairwise(ends), strict=True))

    def count(self, before: Counts | None, windows: int, groups: Iterable[tuple[int, bool]]) -> Counts:
        """Return the counts after a window, given those of the summary so many windows before; None before the first.
        Of each accepted group there is its stratum's number, and whether it is uneven.
        """
        counts = [list(pair) for pair in before or ((0, 0),) * len(self.strata)]
        while windows and any(map(any, counts)):
            counts = [[value * self.decay // GROUP for value in pair] for pair in counts]
            windows -= 1
        for place, is_uneven in groups:
            counts[place][0] += GROUP
            counts[place][1] += GROUP * is_uneven
        return tuple((groups, uneven) for groups, uneven in counts)


class DifficultyTable(Record):
    """The shares by which the groups of one version draw their strata (fields: docs/spec/difficulty.md)."""

    kind: ClassVar[str] = "difficulty"
    window: Window
    summaries: Annotated[tuple[tuple[Key, Digest], ...], Field(max_length=limits.MAX_KEYS)]
    shares: Annotated[tuple[Share, ...], Field(min_length=2, max_length=limits.MAX_STRATA)]

    @model_validator(mode="after")
    def _consistent(self) -> "DifficultyTable":
        if any(one[0] >= two[0] for one, two in pairwise(self.summaries)):
            raise ValueError("validators that do not strictly ascend")
        if sum(self.shares) != SHARES:
            raise ValueError(f"shares that do not add up to {SHARES}")
        if not self.summaries and self.window:
            raise ValueError("a window without summaries of it")
        return self

    @classmethod
    def of(
        cls, rule: DifficultySpec, window: int = 0, ledgers: Mapping[bytes, tuple[bytes, Counts]] | None = None
    ) -> "DifficultyTable":
        """Return the table that follows from a window's summaries (digest, counts), or from the strata's own shares."""
        inputs = sorted((ledgers or {}).items())
        shares = rule.shares([counts for _, (_, counts) in inputs])
        summaries = tuple((validator, digest) for validator, (digest, _) in inputs)
        return cls(window=window, summaries=summaries, shares=shares)


def table_refusal(rule: DifficultySpec | None, table: DifficultyTable | None, first_window: int) -> str:
    """Return what is wrong with a version's table as far as one sees without summaries; empty if nothing is."""
    if rule is None or table is None:
        is_right = rule is None and table is None
        return "" if is_right else "a difficulty table in a run without them, or none in a run with them"
    if len(table.shares) != len(rule.strata):
        return "a difficulty table of other strata"
    if not table.summaries and table != DifficultyTable.of(rule):
        return "a difficulty table that follows from no summaries"
    if table.summaries and table.window >= first_window:
        return "a difficulty table by summaries of a window that is not over when the version begins to serve"
    if any(share < floor for share, floor in zip(table.shares, rule.floors, strict=True)):
        return "a difficulty table with a share below the floor of its stratum"
    return ""
