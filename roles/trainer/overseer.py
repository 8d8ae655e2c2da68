"""The trainer's eye on the validators: canaries that catch those who accept anything, and contradictions told to everybody."""

from collections.abc import Mapping

from protocol import paths
from protocol.ledger import Row
from protocol.limits import MAX_GROUPS
from protocol.report import Deception, Disagreement, Report, canary_key, is_false
from protocol.signing import sign
from protocol.verdict import Reason, Verdict
from roles.node import Node

_DISTRUSTED = "distrusted/"
_TOGETHER = (Reason.WINDOW, Reason.HISTORY)


class Overseer:
    """Compares what validators say of one miner's window, and of the trainer's own canaries.

    Args:
        canaries: how many canaries this trainer's node has run under keys of its own so far.
    """

    def __init__(self, node: Node, canaries: int) -> None:
        self._node = node
        self.canaries = {canary_key(node.key, number).public for number in range(canaries)}
        self.distrusted: set[bytes] = set()
        """Validators whose verdicts do not count: they accepted what was false on purpose."""
        self._heard: dict[int, set[bytes]] = {}
        self._disagreements: dict[int, list[Disagreement]] = {}
        self._deceptions: dict[int, list[Deception]] = {}

    async def open(self) -> None:
        """Remember who was distrusted before a restart.

        Raises:
            StoreError: the state cannot be read.
        """
        async for item in self._node.state.list(_DISTRUSTED):
            self.distrusted.add(paths.key_at_end(item.path))

    async def hear(self, window: int, miner: bytes, verdicts: Mapping[bytes, Verdict]) -> None:
        """Take notice, once, of all verdicts (by validator) on a miner's window.

        Raises:
            StoreError: the state cannot be written.
        """
        if miner in self._heard.setdefault(window, set()):
            return
        self._heard[window].add(miner)
        self._compare(window, miner, verdicts)
        if miner in self.canaries:
            for validator, verdict in sorted(verdicts.items()):
                await self._examine(window, validator, verdict)

    async def _examine(self, window: int, validator: bytes, verdict: Verdict) -> None:
        false = {item.index for item in verdict.judgements if is_false(self._node.key, window, item.index)}
        for judgement in verdict.judgements:
            fallen = bool(false) and judgement.reason in _TOGETHER  # true, and held together with the false ones
            if judgement.accepted == (judgement.index in false) and not fallen:
                found = Deception(
                    validator=validator, canary=verdict.miner, index=judgement.index, accepted=judgement.accepted
                )
                self._deceptions.setdefault(window, []).append(found)
                self._node.telemetry.event(
                    "validator-deceived",
                    window=window,
                    validator=validator.hex(),
                    index=judgement.index,
                    accepted=judgement.accepted,
                    verdict=Row.of(verdict).verdict.hex(),
                )
                if judgement.accepted and validator not in self.distrusted:
                    await self._node.state.put(_DISTRUSTED + validator.hex(), verdict.to_bytes())
                    self.distrusted.add(validator)

    def _compare(self, window: int, miner: bytes, verdicts: Mapping[bytes, Verdict]) -> None:
        said: dict[tuple[int, bytes], tuple[list[bytes], list[bytes]]] = {}
        for validator, verdict in sorted(verdicts.items()):
            for judgement in verdict.judgements:
                accepting, rejecting = said.setdefault((judgement.index, judgement.digest), ([], []))
                (accepting if judgement.accepted else rejecting).append(validator)
        for (index, digest), (accepting, rejecting) in sorted(said.items()):
            if accepting and rejecting:
                found = Disagreement(
                    miner=miner, index=index, digest=digest, accepting=tuple(accepting), rejecting=tuple(rejecting)
                )
                self._disagreements.setdefault(window, []).append(found)
                self._node.telemetry.event(
                    "validators-disagree",
                    window=window,
                    miner=miner.hex()[:8],
                    index=index,
                    accepting=len(accepting),
                    rejecting=len(rejecting),
                )

    async def report(self, window: int) -> None:
        """Publish what there is to say of a window that is over."""
        node = self._node
        self._heard.pop(window, None)
        disagreements, deceptions = self._disagreements.pop(window, []), self._deceptions.pop(window, [])
        if len(disagreements) > MAX_GROUPS or len(deceptions) > MAX_GROUPS:
            error = (
                f"{len(disagreements)} disagreements and {len(deceptions)} deceptions; it names {MAX_GROUPS} of each"
            )
            node.telemetry.event("report-cut", window=window, error=error)
        if disagreements or deceptions:
            record = Report(
                run=node.run_id,
                window=window,
                trainer=node.key.public,
                disagreements=tuple(disagreements[:MAX_GROUPS]),
                deceptions=tuple(deceptions[:MAX_GROUPS]),
            )
            await node.publish(paths.report(node.key.public, window), sign(record, node.key))
