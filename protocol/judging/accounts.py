"""What a validator's ledger says of each miner: balance and score, clean windows, and the evidence against it
(docs/spec/ledger.md). Pure.

The rows of the windows that count are kept as columns of numbers, some 200 bytes of a row where a `LedgerRow` takes
4 KB. With N miners and W windows that count, a new window costs N steps of Python and W operations on arrays of N.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from protocol import limits
from protocol.judging.evidence import NO_EVIDENCE, Evidence, weigh
from protocol.judging.ledger import GROUP, SHARE, Summary, excess_misses, shares
from protocol.proof import MEASURED, ProofSpec
from protocol.run import ScoringSpec

_LARGEST: Final = 1 << 62
"""The largest number that is kept in 64 bits: the sum of two fits."""

_GROUPS: Final = ("counting", "pledged", "submitted", "dealt", "audited", "accepted", "rejected")

_Name = TypeVar("_Name", bound=Hashable)


@dataclass
class _Window:
    """The rows of one window, N of them, of which C have counts."""

    window: int
    scale: tuple[int, int]
    miners: NDArray[np.intp]  # [N], numbers of the miners
    groups: NDArray[np.int32]  # int32 [7, N], by _GROUPS
    amendments: NDArray[np.int32]  # int32 [3, N]: 1 if a row is amended; the groups that this accepts, and rejects
    clean: NDArray[np.bool_]  # bool [N], `LedgerRow.is_clean`
    counted: NDArray[np.intp]  # [C] numbers of (miner, arithmetic)
    excesses: NDArray[Any]  # [C, P] excess misses of `counted` in each measured statistic
    evidence: NDArray[np.int64]  # int64 [C, A], what `counted` add to each alternative
    thresholds: NDArray[np.int64]  # int64 [C, 1], that this evidence is compared with
    tokens: NDArray[Any]  # [N], `LedgerRow.tokens`
    # [3, N]: what each row is worth; how many groups count, in millionths; their tokens, in millionths
    values: NDArray[Any]

    @property
    def is_unaudited(self) -> NDArray[np.bool_]:
        """Of each row, whether groups count that were not audited."""
        *_, dealt, audited, _, rejected = self.groups
        result: NDArray[np.bool_] = (rejected == 0) & (audited > 0) & (audited < dealt) & (self.amendments[0] == 0)
        return result

    def value(self, scoring: ScoringSpec) -> None:
        """Compute `values` (docs/spec/ledger.md)."""
        counting, pledged, submitted, dealt, audited, accepted, rejected = self.groups.astype(object)
        amended, more_accepted, more_rejected = self.amendments.astype(object)
        trusts_all = (amended == 0) & (rejected == 0)
        credit = np.where(trusts_all, counting, np.minimum(accepted + more_accepted, dealt))
        earned = credit * GROUP - scoring.penalty * (rejected + more_rejected)
        value = earned * self.scale[0] // self.scale[1] - scoring.shortfall * (pledged - submitted)
        # A rejection has all groups audited. Who sacrifices one to have longer ones seen is not paid for them.
        has_rejections = rejected + more_rejected > 0
        tokens = np.where(has_rejections, 0, GROUP * credit * self.tokens) // np.maximum(1, accepted)
        counted = np.stack([credit * GROUP, tokens]) * self.scale[0] // self.scale[1]
        self.values = _whole(np.where((dealt > 0) & (audited == 0), 0, np.stack([value, *counted])))


class Accounts:
    """The accounts of all miners by the summaries of one validator that count, up to the newest one; the proof has the
    thresholds of each pair of arithmetics.
    """

    def __init__(self, scoring: ScoringSpec, proof: ProofSpec) -> None:
        self._scoring = scoring
        self._proof = proof
        self._windows: dict[int, _Window] = {}
        self._miners: dict[bytes, int] = {}
        self._pairs: dict[tuple[bytes, str], int] = {}  # of a miner and its arithmetic
        self._evidence: NDArray[np.int64] | None = None  # by pair, until the next window comes
        self._alternatives = len(proof.table[0].alternatives)

    @classmethod
    def of(cls, ledger: Iterable[Summary], scoring: ScoringSpec, proof: ProofSpec) -> Self:
        """Return the accounts after some summaries of one validator, ascending by window."""
        accounts = cls(scoring, proof)
        for summary in ledger:
            accounts.add(summary)
        return accounts

    def add(self, summary: Summary) -> None:
        """Add the newest summary; those that are too old to count beside it are dropped."""
        oldest = summary.window - self._scoring.windows + 1
        self._windows = {window: table for window, table in self._windows.items() if window >= oldest}
        tables = self._windows.values()
        self._miners, numbers = _renumbered(self._miners, [table.miners for table in tables])
        self._pairs, pair_numbers = _renumbered(self._pairs, [table.counted for table in tables])
        for table in tables:
            table.miners, table.counted = numbers[table.miners], pair_numbers[table.counted]
        for amendment in summary.amendments:
            if amendment.window in self._windows:
                amended = self._windows[amendment.window]
                change = np.array([[1], [amendment.accepted], [amendment.rejected]])
                amended.amendments[:, amended.miners == self._miners.get(amendment.miner, -1)] = change
        for window in {amendment.window for amendment in summary.amendments} & self._windows.keys():
            self._windows[window].value(self._scoring)
        rows, scale = summary.rows, summary.dealing.scale
        counted = [row for row in rows if row.counts.computed]
        thresholds = [self._proof.row(row.arithmetic, summary.arithmetic) for row in counted]
        pairs = list(zip(counted, thresholds, strict=True))
        excesses = [[excess_misses(*pair, name) * scale[0] // scale[1] for name in MEASURED] for pair in pairs]
        evidence = np.array([weigh(row.counts, own) for row, own in pairs], object)
        evidence = evidence.reshape(len(counted), self._alternatives).clip(-_LARGEST, _LARGEST)
        self._windows[summary.window] = table = _Window(
            window=summary.window,
            scale=scale,
            miners=_numbers(self._miners, (row.miner for row in rows)),
            groups=np.array([[getattr(row, name) for row in rows] for name in _GROUPS], np.int32),
            amendments=np.zeros((3, len(rows)), np.int32),
            clean=np.array([row.is_clean for row in rows], np.bool_),
            counted=_numbers(self._pairs, ((row.miner, row.arithmetic) for row in counted)),
            excesses=_whole(excesses).reshape(len(counted), len(MEASURED)),
            evidence=evidence.astype(np.int64),
            thresholds=np.array([own.threshold for own in thresholds], np.int64)[:, None],
            tokens=np.array([row.tokens for row in rows], object),
            values=np.empty(0),
        )
        table.value(self._scoring)
        self._evidence = None

    def totals(self) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """Return each miner's balance, in millionths of a group of the newest window, and the mean length of its groups
        that count, in millionths of a token. A balance is negative if penalties exceed the credit. All values are whole
        numbers, and divisions round down.

        A validator counts the groups that were dealt to it, each for as many as there are validators for each judge. So
        a balance is on average that of a validator to which all groups are dealt. Unaudited ones count as accepted if
        none of the miner's groups of that window was rejected and there is no amendment. What remains of a value after
        each window is `decay`. Misses in accepted groups have a price as far as they exceed what honest work may have
        over all windows that count: a cheat too small to be refused costs more than it saves. What honest work may have
        is decided in each window by its pair of arithmetics, and windows in which a miner declared one arithmetic do
        not make up for misses in those of another.
        """
        sums = np.zeros((3, len(self._miners)), object)
        excesses = np.zeros((len(self._pairs), len(MEASURED)), object)
        decay, age, newest = SHARE, 0, max(self._windows, default=0)  # what remains of a value after so many windows
        for table in reversed(self._windows.values()):
            while age < newest - table.window:
                decay, age = decay * self._scoring.decay // SHARE, age + 1
            sums[:, table.miners] += table.values.astype(object) * decay // SHARE
            excesses[table.counted] += table.excesses.astype(object) * decay // SHARE
        balances, groups, tokens = sums
        result = dict(zip(self._miners, balances.tolist(), strict=True))
        lengths = GROUP * tokens // np.maximum(1, groups)
        prices = (self._scoring.miss_price * np.maximum(excesses, 0) // GROUP).sum(axis=1).tolist()
        for (miner, _), price in zip(self._pairs, prices, strict=True):
            result[miner] -= price
        return result, dict(zip(self._miners, lengths.tolist(), strict=True))

    def scores(self) -> tuple[tuple[bytes, int], ...]:
        """Return the `scores` of the newest summary: (miner, share) of each miner that earns something, ascending by
        miner.

        If more than MAX_WINDOW_MINERS miners earn something, those with the largest shares are listed; of equal shares,
        the lower key comes first.
        """
        balances, lengths = self.totals()
        earners = [(miner, share) for miner, share in shares(balances, self._scoring, lengths).items() if share]
        earners.sort(key=lambda item: (-item[1], item[0]))
        return tuple(sorted(earners[: limits.MAX_WINDOW_MINERS]))

    def clean_windows(self) -> dict[bytes, int]:
        """Return each miner's clean windows since its last rejection."""
        counts = np.zeros(len(self._miners), np.int64)
        for table in self._windows.values():
            counts[table.miners] = np.where(table.groups[-1] > 0, 0, counts[table.miners] + table.clean)
        return dict(zip(self._miners, counts.tolist(), strict=True))

    def rejections(self, until: int | None = None) -> dict[bytes, int]:
        """Return, for each miner with rejected groups, the newest such window (of those up to `until`)."""
        newest = np.full(len(self._miners), -1, np.int64)
        for window, table in self._windows.items():
            if until is None or window <= until:
                newest[table.miners[table.groups[-1] > 0]] = window
        return {miner: window for miner, window in zip(self._miners, newest.tolist(), strict=True) if window >= 0}

    def unaudited(self, until: int) -> list[tuple[int, bytes]]:
        """Return each (window, miner) whose row has unaudited groups that count although the miner was rejected in a
        later window (of those up to `until`), ascending by window.
        """
        names, rejections = list(self._miners), self.rejections(until)
        ends = np.array([rejections.get(miner, -1) for miner in names], np.int64)
        return [
            (window, names[number])
            for window, table in self._windows.items()
            for number in table.miners[table.is_unaudited & (window < ends[table.miners])].tolist()
        ]

    def evidence_of(self, miner: bytes, arithmetic: str) -> Evidence:
        """Return the evidence against a miner from the windows in which it declared an arithmetic.

        A rejection does not end it: a miner could otherwise sacrifice a group to be rid of its evidence. It is at most
        the threshold, so that a miner that is honest from now on is soon accepted. Each declaration has its own, so
        that clean windows under wide thresholds take nothing off the evidence under narrow ones.
        """
        if self._evidence is None:
            self._evidence = np.zeros((len(self._pairs), self._alternatives), np.int64)
            for table in self._windows.values():  # the CUSUM of protocol/judging/evidence.py, of all miners at once
                sums = np.maximum(self._evidence[table.counted], 0) + table.evidence
                self._evidence[table.counted] = np.minimum(sums, table.thresholds)
        number = self._pairs.get((miner, arithmetic))
        return NO_EVIDENCE if number is None else tuple(self._evidence[number].tolist())


def _numbers(table: dict[_Name, int], names: Iterable[_Name]) -> NDArray[np.intp]:
    """Return the number of each name; those that are not in the table yet get the next ones."""
    return np.array([table.setdefault(name, len(table)) for name in names], np.intp)


def _renumbered(
    table: Mapping[_Name, int], columns: Sequence[NDArray[np.intp]]
) -> tuple[dict[_Name, int], NDArray[np.intp]]:
    """Return a table of those names whose numbers stand in a column, without gaps and in their order; and by the old
    number of each its new one.
    """
    is_used = np.zeros(len(table), np.bool_)
    for numbers in columns:
        is_used[numbers] = True
    return {name: number for number, name in enumerate(compress(table, is_used))}, np.cumsum(is_used) - 1


def _whole(values: Any) -> NDArray[Any]:
    """Return integers as an array: int64 if all fit."""
    array = np.array(values, object)
    is_small = max((abs(value) for value in array.flat), default=0) <= _LARGEST
    return array.astype(np.int64) if is_small else array
