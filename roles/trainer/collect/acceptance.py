"""What enough validators accept becomes the learner's: fetched, checked against the digest that they name, and
accounted for.
"""

from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import replace

from protocol import environments, limits, paths
from protocol.errors import LimitError, MalformedError, ProtocolError
from protocol.identity.signing import Signed, open_signed
from protocol.rollout.batch import Commitment, open_group
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.trainer.collect.outcome_log import OutcomeLog, windowed
from roles.trainer.collect.quorum import Decision
from roles.trainer.spool import INBOX, SETTLING
from roles.trainer.verified_batch import CANARY, USED, Intent, VerifiedBatch, VerifiedGroup, harvested

_CHANGED = "commitment-changed"
_UNFIT = "verdict-does-not-fit"
_MAY_COME = {_CHANGED, "missing-after-verdict", "changed-after-verdict"}
"""What a look at storage may show, and the next one not."""


class Acceptance:
    """Settles miners' windows.

    Args:
        accounts: where what became of each group is entered.
        canaries: miners of whom nothing is trained on.
    """

    def __init__(self, node: Node, accounts: OutcomeLog, canaries: Set[bytes]) -> None:
        self._node = node
        self._accounts = accounts
        self._canaries = canaries
        self._pending: dict[tuple[int, bytes], Intent] = {}  # decided, and not done yet

    async def open(self) -> None:
        """Carry out what was decided before a restart.

        Raises:
            StoreError, ProtocolError: the state cannot be read or written.
        """
        found = [item.path async for item in self._node.state.list(SETTLING)]
        for path in found:
            await self._carry_out(Intent.from_bytes(await self._node.state.get(path, Intent.max_bytes)))

    async def finish(self, window: int, miner: bytes) -> None:
        """Carry out what was decided when the state could not be written: it stands.

        Raises:
            StoreError: it still cannot.
        """
        if (window, miner) in self._pending:
            await self._carry_out(self._pending[window, miner])

    async def settle(
        self,
        window: int,
        miner: bytes,
        decisions: Sequence[Decision],
        *,
        last: bool,
        given_up: Callable[[], Awaitable[bool]],
    ) -> bool:
        """Fetch what is accepted, hand it over, and account for everything.

        What is decided is durable before anything is done about it: neither a crash nor a full disk can part the
        harvest from the account.

        Args:
            last: whether what storage shows now counts, be it missing or not what was promised.
            given_up: tells, where the miner's storage does not answer, whether it is not waited for any more.

        Returns:
            Whether the miner's storage was asked, and answered.

        Raises:
            StoreError: storage did not answer or does not show what was promised yet, or the state cannot be written.
        """
        if miner in self._canaries:
            decisions = [replace(decision, reason=CANARY) for decision in decisions]
        entered = await self._accounts.outcomes(window, miner)
        pinned = {outcome.commitment for outcome in entered if outcome.outcome == USED}
        decisions = [
            replace(decision, reason=_CHANGED) if not decision.reason and pinned - {decision.commitment} else decision
            for decision in decisions
        ]
        accepted = [decision for decision in decisions if not decision.reason]
        answered = bool(accepted)
        try:
            version, fetched = await self._fetch_all(window, miner, accepted, last)
        except StoreError as error:
            if not await given_up():
                raise
            self._node.telemetry.event("collect-failed", window=window, miner=miner.hex()[:8], error=str(error))
            version, fetched, answered = 0, ["unreachable"] * len(accepted), False
        groups = tuple(group for group in fetched if isinstance(group, VerifiedGroup))
        outcomes = [decision.became(decision.reason) for decision in decisions if decision.reason]
        for decision, group in zip(accepted, fetched, strict=True):
            outcomes.append(decision.became(USED if isinstance(group, VerifiedGroup) else group))
        harvest = VerifiedBatch(window=window, version=version, miner=miner, groups=groups) if groups else None
        settled = Intent(window=window, miner=miner, before=len(entered), harvest=harvest, outcomes=tuple(outcomes))
        await self._decide(settled)
        await self._carry_out(self._pending[window, miner])
        return answered

    async def _decide(self, settled: Intent) -> None:
        """Make a settlement durable; without its groups where they are more than a harvest holds."""
        try:
            if settled.harvest is not None:
                settled.harvest.to_bytes()
                await self._node.state.put(_place(settled), settled.to_bytes())
        except LimitError:
            outcomes = [
                item.model_copy(update={"outcome": "too-large"}) if item.outcome == USED else item
                for item in settled.outcomes
            ]
            settled = settled.model_copy(update={"harvest": None, "outcomes": tuple(outcomes)})
        self._pending[settled.window, settled.miner] = settled

    async def _carry_out(self, settled: Intent) -> None:
        """Hand over and account for what was decided; once more does not harm.

        Raises:
            StoreError: the state cannot be written.
        """
        node, name = self._node, windowed(settled.window, settled.miner)
        if len(await self._accounts.outcomes(settled.window, settled.miner)) == settled.before:
            if settled.harvest is not None:
                behind = f"-{settled.before}" if settled.before else ""  # an earlier one may be on its way still
                await node.state.put(INBOX + name + behind, settled.harvest.to_bytes())
            await self._accounts.enter(settled.window, settled.miner, settled.outcomes)
            used = len(settled.harvest.groups) if settled.harvest else 0
            left = len(settled.outcomes) - used
            node.telemetry.event(
                "collected", window=settled.window, miner=settled.miner.hex()[:8], used=used, left=left
            )
        if settled.harvest is not None:
            await node.state.delete(_place(settled))
        self._pending.pop((settled.window, settled.miner), None)

    async def _fetch_all(
        self, window: int, miner: bytes, accepted: Sequence[Decision], last: bool
    ) -> tuple[int, list[VerifiedGroup | str]]:
        """The version that made a miner's accepted groups, and each of these, or why it is not used.

        Raises:
            StoreError: storage did not answer, or (unless this look is the last) shows something else than was
                promised.
        """
        commitment = await self._commitment(window, miner) if accepted else None
        fetched = [await self._fetch(commitment, decision) for decision in accepted]
        strange = {reason for reason in fetched if isinstance(reason, str)} & _MAY_COME
        if strange and not last:
            raise StoreError(
                f"window {window} of {miner.hex()[:8]}: {', '.join(sorted(strange))}, as storage shows it now"
            )
        return commitment.record.version if commitment else 0, fetched

    async def _commitment(self, window: int, miner: bytes) -> Signed[Commitment] | None:
        """The miner's commitment as storage shows it now; None where it is none."""
        path = paths.commitment(miner, window)
        try:
            data = await self._node.store.get(path, limits.MAX_COMMITMENT_BYTES + limits.MAX_ENVELOPE_BYTES)
            signed = open_signed(data, Commitment, [miner])
            record = signed.record
            if (record.run, record.window, record.miner) != (self._node.run_id, window, miner):
                raise MalformedError("of another run, window or miner", path)
            return signed
        except (NotFoundError, TooLargeError, ProtocolError) as error:
            self._node.telemetry.event("commitment-refused", path=path, error=str(error))
            return None

    async def _fetch(self, commitment: Signed[Commitment] | None, decision: Decision) -> VerifiedGroup | str:
        """An accepted group, its bytes checked against the digest that the verdicts name; or why it is not used.

        Raises:
            StoreError: the storage did not answer.
        """
        if commitment is None or commitment.digest != decision.commitment:
            return _CHANGED
        record = commitment.record
        if decision.index >= len(record.groups) or decision.digest != record.groups[decision.index][0]:
            return _UNFIT  # a validator's word for a group that the miner never promised
        path = paths.batch(record.miner, record.window, record.batch)
        offset, size = record.extent(decision.index)
        try:
            frame = await self._node.store.get(path, size, offset=offset, size=size)
            group = open_group(frame, record, decision.index, self._node.run.group_bytes)
        except NotFoundError:
            return "missing-after-verdict"
        except ProtocolError:
            return "changed-after-verdict"
        exact = environments.is_exact(self._node.run.environment)
        return harvested(group, decision.digest, decision.accepting, exact=exact) or _UNFIT


def _place(settled: Intent) -> str:
    return SETTLING + windowed(settled.window, settled.miner)
