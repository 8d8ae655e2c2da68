"""From a commitment to a verdict: fetch what the second round picked, open it, judge it; after a rejection, judge the
rest.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress

import trio

from protocol import paths
from protocol.errors import LimitError, ProtocolError
from protocol.judging.evidence import Counts
from protocol.judging.verdict import Judgement, Reason, Verdict, refused_together
from protocol.rollout import challenge
from protocol.rollout.batch import Commitment, Group, open_group
from roles.gather import gather
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.validator.judge import Judge, rejected
from roles.validator.window_cases import Case

_FOREIGN = (Reason.PROMPT, Reason.SKETCH, Reason.SAMPLING)
"""What a copy is caught by: as a rule its prompt, but two seeds may name one problem."""

_LOOKS = 4  # at a group whose bytes are others each time
_AT_ONCE = 4  # groups of one miner that are being fetched
_PATIENCE = 0.5  # of the time between the second round and the last one for seals: for the fetches of one step
_PAUSES = 16  # between two tries, within that time
_TRIES = (0.125, 0.25, 0.5)  # what each may take of that time; one that hangs is given up, and others answer

_AtEngine = Callable[[], AbstractAsyncContextManager[None]]
"""Waits until the engine serves a case's version to it alone."""

_Place = tuple[str, int, int]
"""A part of an object: path, offset and size."""


class Auditor:
    """Audits the cases of one window.

    Args:
        node: whose store to read from.
        judge: serves the version that `audit` is given cases of.
        draw: randomness of the window's second round, which picks the groups.
        works: work digest -> miner of groups accepted lately; grows with every accepted group.
    """

    def __init__(self, node: Node, judge: Judge, draw: bytes, works: dict[bytes, bytes]) -> None:
        self._node = node
        self._judge = judge
        self._draw = draw
        self._works = works
        schedule, beacon = node.run.schedule, node.run.beacon
        self._patience = _PATIENCE * (schedule.seal_rounds - schedule.audit_rounds) * beacon.period_ms / 1000
        self._answered: dict[
            bytes, tuple[float, _Place]
        ] = {}  # miner -> when (trio's time) it last answered, and where

    async def audit(
        self,
        case: Case,
        share_ppm: int,
        *,
        known: bool,
        history: Sequence[Counts] = (),
        at_engine: _AtEngine = nullcontext,
    ) -> tuple[Verdict, dict[int, bytes]]:
        """Judge the groups of a case that the second round picks.

        Where one of these is rejected, all of a known miner's are judged. Of a stranger's, the first is judged alone,
        and no
        more if it is rejected: that costs the stranger everything and the validator little.

        Args:
            share_ppm: millionths of the groups that are picked.
            known: whether the ledger knows the miner.
            history: what the miner's windows before this one showed since its last rejection, oldest first.
            at_engine: is entered for every use of the engine.

        Returns:
            The verdict, and the work digest of each rejected group that may be a copy: of a group that is accepted
            later in the window, it can only be named then.

        Raises:
            EngineError: the engine broke; there is no verdict.
            StoreError: storage does not answer, and neither does anybody else's: there is no verdict.
        """
        picked = picked_groups(self._node, case, self._draw, share_ppm)
        alone, others = ((), picked) if known else (picked[:1], picked[1:])
        judgements, strange = await self.judge_groups(case.commitment.record, alone, at_engine)
        if known or all(judgement.accepted for judgement in judgements):
            more, strangers = await self.judge_groups(case.commitment.record, others, at_engine)
            judgements, strange = judgements + more, strange | strangers
        refusal = refused_together(judgements, history, self._node.run.proof)
        if known and (refusal or not all(judgement.accepted for judgement in judgements)):
            rest = tuple(index for index in range(case.submitted) if index not in picked)
            with suppress(StoreError):  # what was found stands
                more, strangers = await self.judge_groups(case.commitment.record, rest, at_engine)
                judgements, strange = judgements + more, strange | strangers
            refusal = refusal or refused_together(judgements, history, self._node.run.proof)
        return verdict_on(self._node, case, refused(judgements, refusal)), strange

    async def judge_groups(
        self, commitment: Commitment, indices: Sequence[int], at_engine: _AtEngine = nullcontext
    ) -> tuple[list[Judgement], dict[int, bytes]]:
        """Judgements on groups of a commitment, and the work digest of each rejected one that may be a copy.

        Raises:
            EngineError: the engine broke.
            StoreError: storage does not answer, and neither does anybody else's.
        """
        opened, judgements = await self._open(commitment, indices)
        if not opened:
            return judgements, {}
        async with at_engine():
            judged = await self._judge.judge([(group, commitment.groups[group.index][0]) for group in opened])
        strange: dict[int, bytes] = {}
        for group, judgement in zip(opened, judged, strict=True):
            work = group.work_digest()
            if judgement.accepted:
                self._works.setdefault(work, commitment.miner)
            elif judgement.reason in _FOREIGN:
                strange[group.index] = work
        return judgements + judged, strange

    def name_copies(self, verdict: Verdict, strange: dict[int, bytes]) -> Verdict:
        """The verdict with its strange groups called copies where the work is known to be another's, or done before."""
        judgements = tuple(
            judgement.model_copy(update={"reason": Reason.COPIED.value})
            if strange.get(judgement.index) in self._works
            else judgement
            for judgement in verdict.judgements
        )
        return verdict.model_copy(update={"judgements": judgements})

    async def _open(self, commitment: Commitment, indices: Sequence[int]) -> tuple[list[Group], list[Judgement]]:
        """The groups that are what was promised, and the judgements on those that are not.

        Raises:
            StoreError: no answer in good time, and none from anybody else either: the way there is broken, or this
                node's own.
        """
        path = paths.batch(commitment.miner, commitment.window, commitment.batch)
        groups: dict[int, Group] = {}
        reasons: dict[int, Reason] = {}
        began = trio.current_time()

        async def read(index: int) -> None:
            try:
                groups[index] = await self._read(path, commitment, index)
            except StoreError:
                reasons[index] = Reason.MISSING
            except ProtocolError:
                reasons[index] = Reason.MALFORMED

        with trio.move_on_after(self._patience) as patience:
            await gather(read, indices, at_once=_AT_ONCE)
        if patience.cancelled_caught and not await self._others_answer(commitment.miner, began):
            raise StoreError(f"{path}: no answer, and none from anybody else")
        rejections = [
            rejected(index, commitment.groups[index][0], reasons.get(index, Reason.MISSING))
            for index in indices
            if index not in groups
        ]
        return [groups[index] for index in indices if index in groups], rejections

    async def _read(self, path: str, commitment: Commitment, index: int) -> Group:
        """A group of a commitment, as its batch in storage has it.

        A failure is looked at again, since storage may lie and the way to it break off, and neither is the miner's
        fault: while nobody else's storage answers, for as long as there is patience. Bytes that come twice are what is
        there; bytes that change from look to look are not the miner's.

        Raises:
            StoreError: it is not to be had; ProtocolError: it is not what was promised.
        """
        offset, size = commitment.extent(index)
        most = self._node.run.group_bytes
        if size > most:
            raise LimitError(f"{size} bytes, where a group of this run takes {most} at most", path)
        seen: list[bytes] = []
        missing, failed = 0, 0
        longer = iter(_TRIES)
        while True:
            began = trio.current_time()
            try:
                frame = await self._ask((path, offset, size), self._patience * next(longer, _TRIES[-1]))
            except (NotFoundError, TooLargeError):
                missing += 1
                if missing == 2:
                    raise
                continue
            except StoreError:
                failed += await self._others_answer(commitment.miner, began)
                if failed == len(_TRIES):
                    raise
                await trio.sleep(self._patience / _PAUSES)
                continue
            try:
                opened: Group = await self._node.run_sync(open_group, frame, commitment, index, most)
            except ProtocolError:
                if frame in seen or len(seen) + 1 == _LOOKS:
                    raise
                seen.append(frame)
            else:
                self._answered[commitment.miner] = trio.current_time(), (path, offset, size)
                return opened

    async def _others_answer(self, miner: bytes, since: float) -> bool:
        """Whether storage of somebody else answered since a moment or, asked once more for what it gave, answers now."""
        others = [(moment, place) for other, (moment, place) in self._answered.items() if other != miner]
        newest, (path, offset, size) = max(others, default=(0.0, ("", 0, 0)))
        if not others or newest >= since:
            return bool(others)
        try:
            await self._ask((path, offset, size), self._patience / _PAUSES)
        except StoreError:
            return False
        return True

    async def _ask(self, place: _Place, seconds: float) -> bytes:
        """What storage has at a place.

        Raises:
            StoreError: it gives no such thing, or nothing in time.
        """
        path, offset, size = place
        with trio.move_on_after(seconds):
            return await self._node.store.get(path, size, offset=offset, size=size)
        raise StoreError(f"{path}: no answer within {seconds:g} s")


def refused(judgements: Sequence[Judgement], reason: Reason | None) -> Sequence[Judgement]:
    """The judgements, none of them accepting where there is a reason against them all."""
    if reason is None:
        return judgements
    refusal = {"reason": reason.value, "rewards": (), "logprobs": b""}
    return [item.model_copy(update=refusal) if item.accepted else item for item in judgements]


def picked_groups(node: Node, case: Case, draw: bytes, share_ppm: int) -> tuple[int, ...]:
    """The group indices that the second round picks from a case."""
    commitment = case.commitment.record
    return challenge.audited(
        node.run_id, commitment.window, draw, commitment.miner, groups=case.submitted, share_ppm=share_ppm
    )


def verdict_on(node: Node, case: Case, judgements: Sequence[Judgement]) -> Verdict:
    """The verdict that these judgements make."""
    commitment = case.commitment.record
    return Verdict(
        run=node.run_id,
        window=commitment.window,
        version=commitment.version,
        miner=commitment.miner,
        validator=node.key.public,
        commitment=case.commitment.digest,
        pledged=case.pledged,
        submitted=case.submitted,
        judgements=tuple(sorted(judgements, key=lambda judgement: judgement.index)),
        seen_ms=int(case.seen * 1000),
    )


def reject_all(node: Node, case: Case, reason: Reason) -> Verdict:
    """The verdict on a case that needs no look at its groups: every one rejected for one reason."""
    groups = case.commitment.record.groups
    return verdict_on(node, case, [rejected(index, groups[index][0], reason) for index in range(case.submitted)])
