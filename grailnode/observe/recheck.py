"""`grailnode verify --rollout` and `--ledger`: a validator's judgements and scores, done again from public objects
alone.
"""

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.table import Table

from grailnode.engine.compute import Compute, make_engine
from protocol import limits, paths
from protocol.digest import content_digest
from protocol.errors import MalformedError, ProtocolError, found_in
from protocol.identity.signing import KEY_BYTES, open_signed
from protocol.judging.evidence import Counts, surprisal_threshold
from protocol.judging.ledger import Amendment, LedgerRow, Summary, histories, scores
from protocol.judging.verdict import Judgement, Reason, ReauditVerdict, Verdict, refused_together
from protocol.rollout.batch import Commitment, Group, open_group
from protocol.run import ProofSpec
from roles.node.identity import Node
from roles.participants import list_announced_keys
from roles.policy.assignment import Task
from roles.policy.follower import Follower
from roles.policy.serving import serve
from roles.ports import NotFoundError, TooLargeError
from roles.seals import find_witness, open_seal
from roles.validator.judge import Judge

_LARGEST = limits.MAX_ENVELOPE_BYTES + limits.MAX_VERDICT_BYTES


@dataclass(frozen=True)
class GroupReference:
    """One group: MINER/WINDOW/GROUP, the miner by its key or the beginning of it."""

    miner: str
    window: int
    index: int

    @classmethod
    def parse(cls, text: str) -> "GroupReference":
        """From the command line.

        Raises:
            ValueError: not of that form.
        """
        miner, _, rest = text.partition("/")
        window, _, index = rest.partition("/")
        if not (miner and window.isdecimal() and index.isdecimal()) or set(miner) - set("0123456789abcdef"):
            raise ValueError(
                f"{text}: write MINER/WINDOW/GROUP, such as 3f9c21/17/0; `grailnode status` shows miners' keys"
            )
        return cls(miner, int(window), int(index))


@dataclass(frozen=True)
class Statistic:
    """One line of a judgement: what was found, and what the run allows."""

    name: str
    found: str
    allowed: str
    holds: bool


@dataclass(frozen=True)
class RecheckedGroup:
    """A group judged again, beside what each validator said of it: (validator's key, its reason or 'accepted')."""

    miner: bytes
    version: int
    judgement: Judgement
    statistics: tuple[Statistic, ...]
    said: tuple[tuple[str, str], ...]


async def replay(node: Node, task: Task, compute: Compute, which: GroupReference) -> RecheckedGroup:
    """Judge one group as a validator does.

    Raises:
        StoreError: an object is not to be had; ProtocolError: one is not what it should be; EngineError.
    """
    miner = await _miner(node, which)
    commitment = await _signed_commitment(node, miner, which.window)
    group = await _group(node, commitment, which.index)
    follower = await Follower.open(node, even_expired=True)
    await follower.refresh()
    serving = follower.version_for(which.window)
    if not serving - node.run.schedule.max_lag <= commitment.version <= serving:
        raise ProtocolError(f"made by version {commitment.version}, but {serving} serves it", f"window {which.window}")
    engine = make_engine(compute, node.run_sync)
    await serve(node, engine, await follower.rebuild(commitment.version))
    randomness = await node.randomness(node.run.schedule.opening(which.window))
    judge = Judge(task, engine, which.window, randomness)
    (judgement,) = await judge.judge([(group, commitment.groups[which.index][0])])
    said = [(key.hex(), await _said(node, key, miner, which)) for key in node.authority.validators]
    statistics = _statistics(judgement, group, node.run.proof)
    return RecheckedGroup(miner, commitment.version, judgement, statistics, tuple(said))


async def _miner(node: Node, which: GroupReference) -> bytes:
    if len(which.miner) == 2 * KEY_BYTES:
        return bytes.fromhex(which.miner)
    fitting = [
        key for key in await list_announced_keys(node) if key.hex().startswith(which.miner)
    ]  # of those too whose time is over
    if len(fitting) != 1:
        raise NotFoundError(
            f"{len(fitting)} participants' keys begin with {which.miner}; give more of it, or all 64 digits"
        )
    return fitting[0]


async def _signed_commitment(node: Node, miner: bytes, window: int) -> Commitment:
    path = paths.commitment(miner, window)
    data = await node.store.get(path, limits.MAX_COMMITMENT_BYTES + limits.MAX_ENVELOPE_BYTES)
    return open_signed(data, Commitment, [miner]).record


async def _group(node: Node, commitment: Commitment, index: int) -> Group:
    if index >= len(commitment.groups):
        raise MalformedError(f"the commitment lists {len(commitment.groups)} groups", f"group {index}")
    path = paths.batch(commitment.miner, commitment.window, commitment.batch)
    offset, size = commitment.extent(index)
    return open_group(await node.store.get(path, size, offset=offset, size=size), commitment, index)


async def _said(node: Node, validator: bytes, miner: bytes, which: GroupReference) -> str:
    """What a validator said of the group."""
    try:
        data = await node.store.get(paths.verdict(validator, which.window, miner), _LARGEST)
        verdict = open_signed(data, Verdict, [validator]).record
    except NotFoundError:
        return "no verdict"
    found = next((item for item in verdict.judgements if item.index == which.index), None)
    return "not audited" if found is None else found.reason or "accepted"


def _statistics(judgement: Judgement, group: Group, proof: ProofSpec) -> tuple[Statistic, ...]:
    claimed = ", ".join(f"{rollout.reward:g}" for rollout in group.rollouts)
    rewards = ", ".join(f"{reward:g}" for reward in judgement.rewards) or "not reached"
    n = judgement.tokens
    lines = [
        Statistic("reason", judgement.reason or "accepted", "accepted", judgement.accepted),
        Statistic(
            "sketch misses",
            f"{judgement.sketch_misses} of {judgement.positions} beyond {proof.sketch_tolerance} units",
            f"{judgement.positions * proof.sketch_rate:.2g} expected",
            judgement.reason != Reason.SKETCH,
        ),
        Statistic(
            "median distance",
            f"{judgement.sketch_median:g} units",
            f"{proof.sketch_median} units",
            judgement.sketch_median <= proof.sketch_median,
        ),
        Statistic(
            "margin misses",
            f"{judgement.margin_misses} of {n} beyond {proof.margin:g}",
            f"{n * proof.margin_rate:.2g} expected",
            judgement.reason != Reason.SAMPLING,
        ),
        Statistic(
            "worst margin",
            f"{judgement.worst_margin:.3g}",
            f"{proof.margin_limit:g}",
            judgement.worst_margin <= proof.margin_limit,
        ),
        Statistic(
            "least probable scope",
            f"10^{-judgement.surprisal + 0.0:.1f}",
            f"10^-{surprisal_threshold(proof):.1f}",
            judgement.surprisal <= surprisal_threshold(proof),
        ),
        Statistic("rewards", rewards, f"claimed {claimed}", judgement.reason != Reason.REWARD),
    ]
    return tuple(lines)


async def verify_ledger(node: Node, validator: bytes, say: Callable[[str], None]) -> int:
    """Check a validator's ledger: links, seals, rows against verdicts, verdicts against their numbers, scores against
    rows.

    Seals and verdicts expire in a bucket whose owner lets them (`grailnode init --bucket`), from the oldest window on.

    Returns:
        The number of summaries that hold.

    Raises:
        ProtocolError: the first lie; StoreError.
    """
    prefix = paths.windowed(validator, "summaries")
    ledger: list[Summary] = []
    async for item in node.store.list(prefix):
        data = await node.store.get(item.path, Summary.max_bytes + limits.MAX_ENVELOPE_BYTES)
        with found_in(item.path):
            ledger.append(open_signed(data, Summary, [validator]).record)
    for before, after in itertools.pairwise(ledger):
        if after.previous != content_digest(before.to_bytes()):
            raise ProtocolError(f"does not follow the summary of window {before.window}", f"window {after.window}")
    rows = {(entry.window, row.miner): row for entry in ledger for row in entry.rows}
    amended: set[tuple[int, bytes]] = set()
    whole = bool(ledger) and ledger[0].previous == b""
    expired = 0  # summaries, the oldest ones, whose seals and verdicts storage does not keep any more
    for place, summary in enumerate(ledger):
        earlier = [item for item in ledger[:place] if item.window > ledger[place - 1].window - node.run.scoring.windows]
        try:
            await _check_summary(node, validator, summary, histories(earlier))
            for amendment in summary.amendments:
                row = rows.get((amendment.window, amendment.miner))
                if row is not None or whole or amendment.window >= ledger[0].window:
                    await _check_amendment(node, validator, amendment, row, amended)
        except NotFoundError:
            if expired < place:
                raise
            expired += 1
        amended.update((amendment.window, amendment.miner) for amendment in summary.amendments)
        counting = [item for item in ledger[: place + 1] if item.window > summary.window - node.run.scoring.windows]
        complete = whole or counting[0].window > ledger[0].window
        if complete and summary.scores != scores(counting, node.run.scoring):
            raise ProtocolError("the scores do not follow from the rows", f"window {summary.window}")
    if ledger:
        verdicts = sum(1 for summary in ledger[expired:] for row in summary.rows if row.verdict)
        first, last = ledger[0].window, ledger[-1].window
        gone = f"; of the first {expired} only links and scores, as their verdicts have expired" if expired else ""
        found = f"windows {first} to {last}, {len(ledger)} summaries linked, {verdicts} verdicts{gone}"
        say(f"validator {validator.hex()[:16]}: {found}")
    return len(ledger)


async def _check_summary(
    node: Node, validator: bytes, summary: Summary, history: Mapping[bytes, Sequence[Counts]]
) -> None:
    place = f"window {summary.window} of validator {validator.hex()[:16]}"
    await _check_sealed(node, validator, summary, place)
    for row in summary.rows:
        if row.verdict:
            data = await node.store.get(paths.verdict(validator, summary.window, row.miner), _LARGEST)
            verdict = open_signed(data, Verdict, [validator]).record
            if LedgerRow.of(verdict) != row:
                raise ProtocolError(f"the row of miner {row.miner.hex()[:8]} is not what its verdict says", place)
            _check_accepted(verdict, history.get(row.miner, ()), node.run.proof, place)


async def _check_sealed(node: Node, validator: bytes, summary: Summary, place: str) -> None:
    """Raise where a summary is not the only one that its validator promised to anybody."""
    digest = content_digest(summary.to_bytes())
    data = await node.store.get(paths.seal(validator, summary.window), limits.MAX_SEAL_BYTES)
    if open_seal(node, summary.window, validator, data).record.summary != digest:
        raise ProtocolError("not the summary that was sealed", place)
    for other in sorted(set(node.authority.validators) - {validator}):
        seen: set[tuple[bytes, bytes]] = set()
        with suppress(NotFoundError, TooLargeError, ProtocolError):  # what is not there speaks against nobody
            seen = await find_witness(node, summary.window, other)
        if any(sealer == validator and other_digest != digest for sealer, other_digest in seen):
            raise ProtocolError(f"sealed twice: another seal was shown to validator {other.hex()[:16]}", place)


async def _check_amendment(
    node: Node, validator: bytes, amendment: Amendment, row: LedgerRow | None, amended: Container[tuple[int, bytes]]
) -> None:
    """Raise where a second look is not at what a row left open, or does not say what its verdict says."""
    place = (
        f"amendment of window {amendment.window}, miner {amendment.miner.hex()[:8]}, validator {validator.hex()[:16]}"
    )
    judged = amendment.accepted + amendment.rejected
    if row is None or row.rejected or (amendment.window, amendment.miner) in amended:
        raise ProtocolError("of a row that is not there, was rejected, or is amended already", place)
    if judged > row.submitted - row.audited or (judged and not amendment.verdict):
        raise ProtocolError("counts groups that the row had not left open, or without a verdict on them", place)
    if amendment.verdict:
        data = await node.store.get(paths.reaudit(validator, amendment.window, amendment.miner), _LARGEST)
        found = LedgerRow.of(open_signed(data, ReauditVerdict, [validator]).record)
        if (found.verdict, found.accepted, found.rejected) != (
            amendment.verdict,
            amendment.accepted,
            amendment.rejected,
        ):
            raise ProtocolError("not what its verdict says", place)


def _check_accepted(verdict: Verdict, history: Sequence[Counts], proof: ProofSpec, place: str) -> None:
    """Raise where a validator accepts what its own numbers refuse."""
    accepted = [judgement for judgement in verdict.judgements if judgement.accepted]
    alone = any(
        max(
            item.surprisal - surprisal_threshold(proof),
            item.sketch_median - proof.sketch_median,
            item.worst_margin - proof.margin_limit,
        )
        > 0
        for item in accepted
    )
    together = refused_together(verdict.judgements, history, proof)
    if alone or together:
        why = together.value if together else "a threshold of a group"
        raise ProtocolError(f"accepts miner {verdict.miner.hex()[:8]} against its own numbers ({why})", place)


def recheck_table(which: GroupReference, found: RecheckedGroup) -> Table:
    """A table for the terminal."""
    table = Table(
        title=f"group {which.index} of miner {found.miner.hex()[:16]} in window {which.window}, version {found.version}",
        caption="\n".join(f"validator {key[:16]}: {said}" for key, said in found.said),
    )
    for heading in ("statistic", "found", "allowed", ""):
        table.add_column(heading, overflow="fold")
    for line in found.statistics:
        table.add_row(line.name, line.found, line.allowed, "" if line.holds else "fails")
    return table
