"""What validators said about the windows of a run, and its outer rounds (docs/spec/outer-round.md). Of a window that is
decided one row and some sums remain, so that the memory of a view does not grow with the run.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from grailnode.observe.state import (
    JudgedWindow,
    MinerKind,
    MinerRow,
    RoundRow,
    SiteRow,
    StratumRow,
    ValidatorRow,
    WindowRow,
)
from protocol import paths
from protocol.encoding import REWARD_UNIT
from protocol.errors import ForkError
from protocol.identity.signing import Signed
from protocol.judging.ledger import SHARE, LedgerRow, Summary, pass_at_k
from protocol.judging.verdict import Judgement, Verdict
from protocol.outer.round_checks import check_next_manifest
from protocol.outer.round_records import CountedContribution, RoundContribution, RoundManifest, RoundPointer
from roles.node.identity import Node
from roles.ports import NotFoundError, TooLargeError
from roles.records import fetch_record

MOST_WINDOWS: Final = 10_000  # rows that are kept
_MOST_MINERS: Final = 4_096  # of which the newest work counts
_RECENT: Final = 40  # windows in the history of a miner or a validator


@dataclass
class _Work:
    """The groups of a miner, or those that a validator judged, and its newest windows."""

    submitted: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    windows: int = 0
    recent: deque[JudgedWindow] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, window: int, submitted: int, accepted: int, rejected: Mapping[str, int]) -> None:
        self.submitted += submitted
        self.accepted += accepted
        self.rejected.update(rejected)
        self.windows += 1
        self.recent.append(JudgedWindow(window, accepted, sum(rejected.values())))


class WindowHistory:
    """The windows of one run, whose groups count by so many validators. `add_summary` and `add_verdict` take what was
    read, `close` ends windows.
    """

    def __init__(self, pass_at: int, quorum: int = 1) -> None:
        self._pass_at = pass_at
        self._quorum = quorum
        self._verdicts: dict[tuple[int, bytes], list[Verdict]] = {}
        self._summaries: dict[tuple[int, bytes], Summary] = {}
        self._rows: dict[int, WindowRow] = {}
        self._miners: dict[bytes, _Work] = {}
        self._validators: dict[bytes, _Work] = {}
        self._checks: Counter[bytes] = Counter()  # tokens that a validator checked
        self._check_ms: Counter[bytes] = Counter()
        self._tokens: Counter[str] = Counter()  # of closed windows

    def add_summary(self, summary: Summary) -> None:
        """Add a validator's summary, behind its verdicts."""
        self._summaries[summary.window, summary.validator] = summary
        self._checks[summary.validator] += summary.verified_tokens
        self._check_ms[summary.validator] += summary.verify_ms
        accepted, rejected = (sum(getattr(row, name) for row in summary.rows) for name in ("accepted", "rejected"))
        work = self._validators.setdefault(summary.validator, _Work())
        work.add(summary.window, accepted + rejected, accepted, {"": rejected})

    def add_old(self, summary: Summary) -> None:
        """Add the row of a window before those that are read whole."""
        self._rows[summary.window] = self._row(summary)

    def add_verdict(self, verdict: Verdict) -> None:
        """Add a verdict, if it is on the same work as the others on this miner's window."""
        judgements = tuple(judgement.model_copy(update={"logprobs": b""}) for judgement in verdict.judgements)
        others = self._verdicts.setdefault((verdict.window, verdict.miner), [])
        if all((other.commitment, other.lapsed) == (verdict.commitment, verdict.lapsed) for other in others[:1]):
            others.append(verdict.model_copy(update={"judgements": judgements}))  # log-probabilities are most of it

    def has_summary(self, window: int, validator: bytes) -> bool:
        return (window, validator) in self._summaries

    def is_judged_whole(self, window: int, row: LedgerRow) -> bool:
        """Whether another validator's verdict on a row brings nothing new: its groups were not dealt, or all judged by
        a quorum.
        """
        verdicts = self._verdicts.get((window, row.miner), [])
        judged = Counter(judgement.index for verdict in verdicts for judgement in verdict.judgements)
        return bool(verdicts) and (
            not row.dealt
            or sum(verdict.dealt == verdict.submitted for verdict in verdicts) >= self._quorum
            or all(judged[index] >= self._quorum for index in range(verdicts[0].submitted))
        )

    def close(self, before: int) -> None:
        """Keep rows and sums alone of the windows before one; the newest window with a summary stays open."""
        before = min(before, max((window for window, _ in self._summaries), default=before))
        self._rows |= {row.window: row for row in self._open_rows() if row.window < before}
        for window in sorted(self._rows)[:-MOST_WINDOWS]:
            del self._rows[window]
        closed = [verdict for verdict in self._open_decisions() if verdict.window < before]
        _add_work(self._miners, closed)
        self._tokens.update(_tokens(closed))
        newest = sorted(self._miners, key=lambda key: self._miners[key].recent[-1].window)
        for key in newest[:-_MOST_MINERS]:
            del self._miners[key]
        self._verdicts = {place: item for place, item in self._verdicts.items() if place[0] >= before}
        self._summaries = {place: item for place, item in self._summaries.items() if place[0] >= before}

    def revealed(self, window: int) -> list[bytes]:
        """Return the validators whose summary of an open window was added."""
        return [validator for number, validator in self._summaries if number == window]

    def miners(self) -> set[bytes]:
        """Return the miners of which a verdict was added."""
        return {*self._miners, *(miner for _, miner in self._verdicts)}

    def window_rows(self) -> tuple[WindowRow, ...]:
        """Return the windows of which a summary was added, in order."""
        rows = self._rows | {row.window: row for row in self._open_rows()}
        return tuple(rows[window] for window in sorted(rows))

    def _open_decisions(self) -> list[Verdict]:
        """Return what a quorum says about each miner's open window."""
        return [_decided(verdicts, self._quorum) for verdicts in self._verdicts.values()]

    def _first_summaries(self) -> dict[int, Summary]:
        """Return one summary for each open window: that of the first validator that revealed one."""
        summaries: dict[int, Summary] = {}
        for (window, _), summary in self._summaries.items():
            summaries.setdefault(window, summary)
        return summaries

    def _open_rows(self) -> list[WindowRow]:
        by_window: dict[int, list[Judgement]] = {}
        for verdict in self._open_decisions():
            by_window.setdefault(verdict.window, []).extend(verdict.judgements)
        rows = []
        for window, summary in self._first_summaries().items():
            judgements = by_window.get(window, [])
            rewards = [reward for judgement in judgements for reward in judgement.rewards]
            row = replace(
                self._row(summary),
                accepted=sum(judgement.accepted for judgement in judgements),
                rejected=sum(judgement.rejected for judgement in judgements),
                reward=sum(rewards) / (len(rewards) * REWARD_UNIT) if rewards else None,
            )
            rows.append(row)
        return rows

    def _row(self, summary: Summary) -> WindowRow:
        """Return the row of a window by one validator's summary alone, which has no rewards."""
        evaluation = summary.evaluation
        # A validator that broke the rule may have drawn fewer completions than pass@k needs.
        k = min(self._pass_at, len(evaluation.strata[0].right) - 1) if evaluation else 1
        return WindowRow(
            window=summary.window,
            version=summary.version,
            accepted=sum(row.accepted for row in summary.rows),
            rejected=sum(row.rejected for row in summary.rows),
            reward=None,
            pass_at_1=evaluation.pass_at(1) if evaluation else None,
            pass_at_k=evaluation.pass_at(k) if evaluation else None,
            strata=tuple(
                StratumRow(item.name, item.problems, pass_at_k(item.right, 1), pass_at_k(item.right, k))
                for item in (evaluation.strata if evaluation else ())
            ),
        )

    def miner_rows(
        self, names: Mapping[bytes, str], kinds: Mapping[bytes, MinerKind]
    ) -> tuple[tuple[MinerRow, ...], dict[str, tuple[JudgedWindow, ...]]]:
        """Return the miners by name, and by key the newest windows of each."""
        miners = deepcopy(self._miners)
        _add_work(miners, self._open_decisions())
        firsts = self._first_summaries()
        scores = dict(firsts[max(firsts)].scores) if firsts else {}
        rows = [
            MinerRow(
                key=key.hex(),
                name=names.get(key) or key.hex()[:8],
                kind=kinds.get(key, "unknown"),
                submitted=work.submitted,
                accepted=work.accepted,
                rejected=dict(sorted(work.rejected.items())),
                score=scores.get(key, 0) / SHARE,
            )
            for key, work in sorted(miners.items())
        ]
        recent = {key.hex(): tuple(work.recent) for key, work in miners.items()}
        return tuple(sorted(rows, key=lambda row: row.name)), recent

    def validator_rows(self, keys: Iterable[bytes], names: Mapping[bytes, str]) -> tuple[ValidatorRow, ...]:
        """Return the validators with some keys, in the order of these."""
        rows = []
        for key in keys:
            work, milliseconds = self._validators.get(key, _Work()), self._check_ms[key]
            rows.append(
                ValidatorRow(
                    key=key.hex(),
                    name=names.get(key) or key.hex()[:8],
                    windows=work.windows,
                    accepted=work.accepted,
                    rejected=work.rejected.total(),
                    check_rate=1000.0 * self._checks[key] / milliseconds if milliseconds else 0.0,
                    recent=tuple(work.recent),
                )
            )
        return tuple(rows)

    def tokens(self) -> Counter[str]:
        """Return the completion tokens of judged groups ('generated') and of accepted ones ('verified')."""
        return self._tokens + _tokens(self._open_decisions())

    def check_rate(self) -> float:
        """Return the completion tokens that a validator checks in a second of checking; 0 before the first summary."""
        milliseconds = self._check_ms.total()
        return 1000.0 * self._checks.total() / milliseconds if milliseconds else 0.0


def _add_work(miners: dict[bytes, _Work], verdicts: Iterable[Verdict]) -> None:
    for verdict in sorted(verdicts, key=lambda verdict: verdict.window):
        rejections = Counter(judgement.reason for judgement in verdict.judgements if judgement.rejected)
        accepted = sum(judgement.accepted for judgement in verdict.judgements)
        miners.setdefault(verdict.miner, _Work()).add(verdict.window, verdict.submitted, accepted, rejections)


def _tokens(verdicts: Iterable[Verdict]) -> Counter[str]:
    judgements = [judgement for verdict in verdicts for judgement in verdict.judgements]
    generated = sum(judgement.tokens for judgement in judgements)
    return Counter(
        generated=generated, verified=sum(judgement.tokens for judgement in judgements if judgement.accepted)
    )


def _decided(verdicts: Sequence[Verdict], quorum: int) -> Verdict:
    """Return one verdict with a judgement on each group: it is accepted if a quorum does, or all while these are fewer,
    and has then the medians of their rewards, as a trainer learns from them.
    """
    by_group: dict[int, list[Judgement]] = {}
    for judgement in (judgement for verdict in verdicts for judgement in verdict.judgements):
        by_group.setdefault(judgement.index, []).append(judgement)
    decided = []
    for _, judgements in sorted(by_group.items()):
        accepting = [judgement for judgement in judgements if judgement.accepted]
        if len(accepting) < min(quorum, len(judgements)):
            decided.append(next(judgement for judgement in judgements if not judgement.accepted))
            continue
        size = Counter(len(judgement.rewards) for judgement in accepting).most_common(1)[0][0]
        columns = zip(*(item.rewards for item in accepting if len(item.rewards) == size), strict=True)
        rewards = tuple(int(median(column)) for column in columns)
        decided.append(accepting[0].model_copy(update={"rewards": rewards}))
    return verdicts[0].model_copy(update={"judgements": tuple(decided)})


_RECENT_ROUNDS: Final = 64
_MOST_ROUNDS: Final = 4_096


class RoundHistory:
    """The rounds of one run: at each `refresh` those that are new, the newest 64 at most."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._newest: Signed[RoundManifest] | None = None
        self.rows: deque[RoundRow] = deque(maxlen=_MOST_ROUNDS)
        self._work: dict[bytes, Counter[str]] = {}  # of each site, by field of SiteRow
        self._refused: defaultdict[bytes, Counter[str]] = defaultdict(Counter)

    async def refresh(self) -> None:
        """Read the round manifests that are new, and the contributions that they name."""
        node = self._node
        trainer = node.authority.trainers[0]
        pointer = (await fetch_record(node, RoundPointer, paths.newest_round(trainer))).record
        read = -1 if self._newest is None else self._newest.record.number
        for number in range(max(read, pointer.newest - _RECENT_ROUNDS) + 1, pointer.newest + 1):
            try:
                signed = await fetch_record(node, RoundManifest, paths.round_manifest(trainer, number))
            except NotFoundError:
                continue  # an old one, which no site needs any more
            self._check(signed)
            steps = {item.worker: await self._local_steps(item, number) for item in signed.record.counted}
            self._add(signed.record, steps)
            self._newest = signed

    def _check(self, signed: Signed[RoundManifest]) -> None:
        before = self._newest
        if before is None or before.record.number + 1 != signed.record.number:
            return
        try:
            check_next_manifest(before, signed)
        except ForkError:
            if signed.record.epoch <= before.record.epoch:
                raise  # else another coordinator took over, and went on from an earlier round

    async def _local_steps(self, item: CountedContribution, number: int) -> int:
        """Return the local steps of a contribution; 0 if its record is no longer there."""
        try:
            signed = await fetch_record(self._node, RoundContribution, paths.contribution(item.worker, number))
        except (NotFoundError, TooLargeError):
            return 0
        return signed.record.local_steps if signed.digest == item.contribution else 0

    def _add(self, manifest: RoundManifest, steps: Mapping[bytes, int]) -> None:
        for worker in manifest.workers:
            self._work.setdefault(worker, Counter())
        if manifest.number == 0:
            return
        for item in manifest.counted:
            work = self._work.setdefault(item.worker, Counter())
            work.update(rounds=1, steps=steps[item.worker], groups=len(item.groups), payload_bytes=item.payload.total)
        for refusal in manifest.refused:
            self._work.setdefault(refusal.worker, Counter())
            self._refused[refusal.worker][refusal.reason] += 1
        self.rows.append(
            RoundRow(
                number=manifest.number,
                step=manifest.state.step,
                version=manifest.version,
                counted=len(manifest.counted),
                sites=len(manifest.counted) + len(manifest.refused),
                local_steps=sum(steps.values()),
                groups=sum(len(item.groups) for item in manifest.counted),
                payload_bytes=sum(item.payload.total for item in manifest.counted),
            )
        )

    def site_rows(self, names: Mapping[bytes, str]) -> tuple[SiteRow, ...]:
        """Return the sites of these rounds, by name."""
        rows = [
            SiteRow(
                key=key.hex(),
                name=names.get(key) or key.hex()[:8],
                rounds=work["rounds"],
                refused=dict(sorted(self._refused[key].items())),
                steps=work["steps"],
                groups=work["groups"],
                payload_bytes=work["payload_bytes"],
            )
            for key, work in self._work.items()
        ]
        return tuple(sorted(rows, key=lambda row: row.name))
