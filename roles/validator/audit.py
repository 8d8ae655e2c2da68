"""From a commitment to a verdict: fetch the groups that the second round deals to this validator and picks, open them
and judge them; after a rejection, judge the others that are dealt to it too.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import trio

from protocol import paths
from protocol.errors import LimitError, ProtocolError
from protocol.judging.evidence import NO_EVIDENCE, Evidence
from protocol.judging.roster import Roster
from protocol.judging.verdict import Judgement, Reason, Verdict, joint_rejection
from protocol.proof import Thresholds
from protocol.rollout import challenge
from protocol.rollout.batch import Commitment, Group, open_group
from roles.gather import answer_of, gather
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.validator.judge import NO_SLOTS, Judge, Slots
from roles.validator.window_cases import Case

_REASONS_OF_COPIES = (Reason.PROMPT, Reason.SKETCH, Reason.SAMPLING)
"""Why a copy of another miner's group is rejected: as a rule for its prompt, but two seeds may name one problem."""

_MAX_READS = 4  # of a group whose bytes differ at each read
_AT_ONCE = 4  # groups of one miner that are being fetched
_PATIENCE = 0.5  # for the fetches of one step: a share of the time between the second round and the last one for seals
_PAUSES = 16  # in that time, one between two tries
_TRIES = (0.125, 0.25, 0.5)  # the share of that time for each try that hangs while other storage answers

_Place = tuple[str, int, int]
"""A part of an object: path, offset and size."""


class Auditor:
    """Audits the cases of one window, by a judge that serves their version, a roster with this validator, and the
    randomness of the second round, which deals and picks the groups. Accepted groups are added to `accepted_work`:
    their work digests and miners.
    """

    def __init__(
        self, node: Node, judge: Judge, roster: Roster, draw: bytes, accepted_work: dict[bytes, bytes]
    ) -> None:
        self._node = node
        self._judge = judge
        self._roster = roster
        self._draw = draw
        self._accepted_work = accepted_work
        schedule, beacon = node.run.schedule, node.run.beacon
        self._patience = _PATIENCE * (schedule.seal_rounds - schedule.audit_rounds) * beacon.period_ms / 1000
        # of the two miners whose storage answered last: when (trio's time), and for which part of an object
        self._last_answers: dict[bytes, tuple[float, _Place]] = {}

    async def audit(
        self, case: Case, share_ppm: int, *, is_known: bool, evidence: Evidence = NO_EVIDENCE, slots: Slots = NO_SLOTS
    ) -> tuple[Verdict, dict[int, bytes]]:
        """Judge the groups of a case that the second round deals to this validator and picks.

        If one of them is rejected, all groups of a known miner that are dealt to it are judged, or as many as a verdict
        has room for, by R1 as well, so that the miner does not know those that never are. Of a stranger's groups,
        the first one is judged alone, and no other unless it is accepted: that costs the stranger everything and the
        validator little.

        Args:
            share_ppm: millionths of the groups that are picked.
            evidence: of the miner's earlier windows.
            slots: the engine's serves the case's version to it alone.

        Returns:
            The verdict, and the work digest of each rejected group that may be a copy, by the group's index. The
            original may be accepted later in the window, so `name_copies` decides at its end.
        """
        commitment, dealt = case.commitment.record, self.dealt_groups(case)
        thresholds = self.thresholds(commitment)
        audit_groups = self.picked_groups(case, share_ppm)
        judgements: list[Judgement] = []
        suspected_copies: dict[int, bytes] = {}

        async def judge_more(indices: Sequence[int]) -> None:
            more_judgements, more_copies = await self.judge_groups(commitment, indices, slots)
            judgements.extend(more_judgements)
            suspected_copies.update(more_copies)

        if not is_known:
            await judge_more(audit_groups[:1])
        if all(judgement.accepted for judgement in judgements):
            await judge_more(audit_groups if is_known else audit_groups[1:])
        is_refused = joint_rejection(judgements, evidence, thresholds) or any(item.rejected for item in judgements)
        if is_known and is_refused:
            others = [index for index in self.picked_groups(case) if index not in audit_groups]
            with suppress(StoreError):  # the judgements on the picked groups are enough for a verdict
                await judge_more(others)
        refusal = joint_rejection(judgements, evidence, thresholds)  # by all of them, as anybody can compute it again
        return self.make_verdict(case, len(dealt), reject_accepted(judgements, refusal)), suspected_copies

    def dealt_groups(self, case: Case) -> tuple[int, ...]:
        """Return the indices of the groups of a case that are dealt to this validator."""
        node, window = self._node, case.commitment.record.window
        return self._roster.dealt_groups(
            node.run_id, window, self._draw, case.miner, groups=case.submitted_groups, validator=node.key.public
        )

    def picked_groups(self, case: Case, share_ppm: int | None = None) -> tuple[int, ...]:
        """Return the indices of the groups dealt to this validator that the second round picks: by default, as many as
        a verdict has room for.
        """
        run, window, groups = self._node.run, case.commitment.record.window, case.submitted_groups
        share = run.largest_share(groups) if share_ppm is None else share_ppm
        place, dealt = (self._node.run_id, window, self._draw, case.miner), self.dealt_groups(case)
        return challenge.audit_indices(*place, groups=groups, share_ppm=share, dealt=dealt)

    def reject_all(self, case: Case, reason: Reason) -> Verdict:
        """Return the verdict that gives one reason, without reading any, to every group of a case that is dealt to this
        validator; if the miner's version has lapsed, to all that it submitted.
        """
        indices = range(case.submitted_groups) if reason is Reason.LAPSED else self.dealt_groups(case)
        groups = case.commitment.record.groups
        judgements = [Judgement(index=index, digest=groups[index][0], reason=reason.value) for index in indices]
        return self.make_verdict(case, len(indices), judgements)

    async def judge_groups(
        self, commitment: Commitment, indices: Sequence[int], slots: Slots = NO_SLOTS
    ) -> tuple[list[Judgement], dict[int, bytes]]:
        """Judge groups of a commitment; return also the work digests of rejected ones that may be copies, by index."""
        groups, rejections = await self._fetch_groups(commitment, indices)
        if not groups:
            return rejections, {}
        pairs = [(group, commitment.groups[group.index][0]) for group in groups]
        judgements = await self._judge.judge(pairs, self.thresholds(commitment), slots)
        suspected_copies: dict[int, bytes] = {}
        for group, judgement in zip(groups, judgements, strict=True):
            work = group.work_digest()
            if judgement.accepted:
                self._accepted_work.setdefault(work, commitment.miner)
            elif judgement.reason in _REASONS_OF_COPIES:
                suspected_copies[group.index] = work
        return rejections + judgements, suspected_copies

    def thresholds(self, commitment: Commitment) -> Thresholds:
        """Return the thresholds for groups of a commitment."""
        return self._node.run.proof.row(commitment.arithmetic, self._judge.arithmetic)

    def make_verdict(self, case: Case, dealt: int, judgements: Sequence[Judgement]) -> Verdict:
        """Return the verdict on a case of whose groups `dealt` are dealt to this validator."""
        commitment = case.commitment.record
        return Verdict(
            run=self._node.run_id,
            window=commitment.window,
            version=commitment.version,
            miner=commitment.miner,
            validator=self._node.key.public,
            commitment=case.commitment.digest,
            miner_arithmetic=commitment.arithmetic,
            validator_arithmetic=self._judge.arithmetic,
            pledged=case.pledged_groups,
            submitted=case.submitted_groups,
            dealt=dealt,
            judgements=tuple(sorted(judgements, key=lambda judgement: judgement.index)),
            seen_ms=int(case.read_time * 1000),
        )

    def name_copies(self, verdict: Verdict, suspected_copies: dict[int, bytes]) -> Verdict:
        """Return the verdict with the reason COPIED for each suspected copy whose work was accepted elsewhere."""
        judgements = tuple(
            judgement.model_copy(update={"reason": Reason.COPIED.value})
            if suspected_copies.get(judgement.index) in self._accepted_work
            else judgement
            for judgement in verdict.judgements
        )
        return verdict.model_copy(update={"judgements": judgements})

    async def _fetch_groups(
        self, commitment: Commitment, indices: Sequence[int]
    ) -> tuple[list[Group], list[Judgement]]:
        """Return the groups that are what the commitment promises, and rejections of the others."""
        path = paths.batch(commitment.miner, commitment.window, commitment.batch)
        groups: dict[int, Group] = {}
        reasons: dict[int, Reason] = {}
        start = trio.current_time()

        async def fetch(index: int) -> None:
            try:
                groups[index] = await self._fetch_group(path, commitment, index)
            except StoreError:
                reasons[index] = Reason.MISSING
            except ProtocolError:
                reasons[index] = Reason.MALFORMED

        with trio.move_on_after(self._patience) as patience:
            await gather(fetch, indices, at_once=_AT_ONCE)
        if patience.cancelled_caught:
            if not await self._other_storage_answers(commitment.miner, start):
                raise StoreError(f"{path}: no answer, and none from other storage")
            # This node may have been what did not answer: the miner's storage gets the chance that the other one got.
            unread_indices = [index for index in indices if index not in groups and index not in reasons]
            with trio.move_on_after(self._patience / _PAUSES):
                await gather(fetch, unread_indices, at_once=len(unread_indices) or 1)
        rejections = [
            Judgement(index=index, digest=commitment.groups[index][0], reason=reasons.get(index, Reason.MISSING).value)
            for index in indices
            if index not in groups
        ]
        return [groups[index] for index in indices if index in groups], rejections

    async def _fetch_group(self, path: str, commitment: Commitment, index: int) -> Group:
        """Fetch a group of a commitment from its batch in storage.

        Storage may lie and a connection may break, and neither is the miner's fault. So a fetch that fails is repeated:
        while no other storage answers either, as long as the caller's patience lasts. The same false bytes twice are
        what the miner stored; bytes that differ at each read are the fault of the storage, but only so often.
        """
        offset, size = commitment.extent(index)
        max_bytes = self._node.run.group_bytes
        if size > max_bytes:
            raise LimitError(f"{size} bytes, where a group of this run takes {max_bytes} at most", path)
        false_frames: list[bytes] = []
        absences, failures = 0, 0
        shares = iter(_TRIES)
        while True:
            start = trio.current_time()
            try:
                frame = await self._get((path, offset, size), self._patience * next(shares, _TRIES[-1]))
            except (NotFoundError, TooLargeError):
                absences += 1
                if absences == 2:
                    raise
                continue
            except StoreError:
                failures += await self._other_storage_answers(commitment.miner, start)
                if failures == len(_TRIES):
                    raise
                await trio.sleep(self._patience / _PAUSES)
                continue
            try:
                group: Group = await self._node.run_sync(open_group, frame, commitment, index, max_bytes)
            except ProtocolError:
                if frame in false_frames or len(false_frames) + 1 == _MAX_READS:
                    raise
                false_frames.append(frame)
            else:
                self._last_answers.pop(commitment.miner, None)
                self._last_answers[commitment.miner] = trio.current_time(), (path, offset, size)
                for oldest in [*self._last_answers][:-2]:
                    del self._last_answers[oldest]
                return group

    async def _other_storage_answers(self, miner: bytes, since: float) -> bool:
        """Return whether another miner's storage has answered since a time, or answers now to its last request."""
        answers = [(time, place) for other, (time, place) in self._last_answers.items() if other != miner]
        newest, place = max(answers, default=(0.0, ("", 0, 0)))
        if not answers or newest >= since:
            return bool(answers)
        try:
            await self._get(place, self._patience / _PAUSES)
        except StoreError:
            return False
        return True

    async def _get(self, place: _Place, seconds: float) -> bytes:
        """Return the bytes at a place."""
        path, offset, size = place
        return await answer_of(partial(self._node.store.get, path, size, offset=offset, size=size), seconds, path)


def reject_accepted(judgements: Sequence[Judgement], reason: Reason | None) -> Sequence[Judgement]:
    """Return the judgements; if there is a reason against all of them, those with counts that do not reject yet reject
    for this reason.
    """
    if reason is None:
        return judgements
    refusal = {"reason": reason.value, "rewards": (), "ends": (), "logprobs": b""}
    return [
        item if item.rejected or not item.counts.computed else item.model_copy(update=refusal) for item in judgements
    ]
