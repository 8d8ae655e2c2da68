"""What enough validators accept becomes the learner's: fetched, checked against the digest that they name, and accounted for."""

from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import replace

from protocol import environments, limits, paths
from protocol.errors import MalformedError, ProtocolError
from protocol.rollout import Commitment, open_group
from protocol.signing import Signed, open_signed
from roles.node import Node
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.trainer.accounts import Accounts, windowed
from roles.trainer.harvest import CANARY, USED, Harvest, HarvestedGroup, harvested
from roles.trainer.quorum import Decision
from roles.trainer.spool import INBOX


class Settlement:
    """Settles miners' windows.

    Args:
        accounts: where what became of each group is entered.
        canaries: miners of whom nothing is trained on.
    """

    def __init__(self, node: Node, accounts: Accounts, canaries: Set[bytes]) -> None:
        self._node = node
        self._accounts = accounts
        self._canaries = canaries

    async def settle(
        self,
        window: int,
        miner: bytes,
        decisions: Sequence[Decision],
        *,
        closed: bool,
        given_up: Callable[[], Awaitable[bool]],
    ) -> None:
        """Fetch what is accepted, hand it over, and account for everything.

        Args:
            closed: whether the window is, so that what is missing stays missing.
            given_up: tells, where the miner's storage does not answer, whether it is not waited for any more.

        Raises:
            StoreError: the storage did not answer, or the state cannot be written; nothing is settled yet.
        """
        if miner in self._canaries:
            decisions = [replace(decision, reason=CANARY) for decision in decisions]
        accepted = [decision for decision in decisions if not decision.reason]
        try:
            version, fetched = await self._fetch_all(window, miner, accepted, closed)
        except StoreError as error:
            if not await given_up():
                raise
            self._node.telemetry.event("collect-failed", window=window, miner=miner.hex()[:8], error=str(error))
            version, fetched = 0, ["unreachable"] * len(accepted)
        groups = [group for group in fetched if isinstance(group, HarvestedGroup)]
        before = len(await self._accounts.outcomes(window, miner))
        if groups:
            harvest = Harvest(window=window, version=version, miner=miner, groups=tuple(groups))
            behind = f"-{before}" if before else ""  # what was handed over before may be on its way still
            await self._node.state.put(INBOX + windowed(window, miner) + behind, harvest.to_bytes())
        outcomes = [decision.became(decision.reason) for decision in decisions if decision.reason]
        for decision, group in zip(accepted, fetched, strict=True):
            outcomes.append(decision.became(USED if isinstance(group, HarvestedGroup) else group))
        await self._accounts.enter(window, miner, outcomes)
        self._node.telemetry.event(
            "collected", window=window, miner=miner.hex()[:8], used=len(groups), left=len(outcomes) - len(groups)
        )

    async def _fetch_all(
        self, window: int, miner: bytes, accepted: Sequence[Decision], closed: bool
    ) -> tuple[int, list[HarvestedGroup | str]]:
        """The version that made a miner's accepted groups, and each of these, or why it is not used.

        Raises:
            StoreError: the storage did not answer.
        """
        commitment = await self._commitment(window, miner) if accepted else None
        fetched = [await self._fetch(commitment, decision, closed) for decision in accepted]
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

    async def _fetch(
        self, commitment: Signed[Commitment] | None, decision: Decision, closed: bool
    ) -> HarvestedGroup | str:
        """An accepted group, its bytes checked against the digest that the verdicts name; or why it is not used.

        Raises:
            StoreError: the storage did not answer, or (while the window is open) does not show the batch yet.
        """
        if commitment is None or commitment.digest != decision.commitment:
            return "commitment-changed"
        record = commitment.record
        if decision.index >= len(record.groups) or decision.digest != record.groups[decision.index][0]:
            return "verdict-does-not-fit"  # a validator's word for a group that the miner never promised
        path = paths.batch(record.miner, record.window, record.batch)
        offset, size = record.extent(decision.index)
        try:
            frame = await self._node.store.get(path, size, offset=offset, size=size)
            group = open_group(frame, record, decision.index, self._node.run.group_bytes)
        except NotFoundError:
            if closed:
                return "missing-after-verdict"
            raise
        except ProtocolError:
            return "changed-after-verdict"
        exact = environments.is_exact(self._node.run.environment)
        return harvested(group, decision.digest, decision.accepting, exact=exact) or "verdict-does-not-fit"
