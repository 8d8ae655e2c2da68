"""The trainer's own log-probabilities of strangers' groups, which the canary computes beside its mining.

A canary's own true groups are few. So the canary notes the log-probabilities of some groups of all other miners too,
which a secret coin picks, for the trainer's collector to compare with what validators say. It does so between the
deadline of a window and the opening of the next one, while its engine still serves the window's version; groups of
other versions are passed over.
"""

from dataclasses import dataclass
from typing import Final

from grailnode.node.canary import note_logprobs
from protocol import paths
from protocol.errors import ProtocolError
from protocol.identity.signing import SigningKey
from protocol.judging.stratum_counts import SharesOf
from protocol.rollout.batch import Commitment, open_group
from roles.gather import gather
from roles.node.identity import Node
from roles.participants import find_participants
from roles.policy.assignment import Task
from roles.ports import BeaconError, Engine, EngineError, NotFoundError, ObjectStore, StoreError, TooLargeError
from roles.records import fetch_record

AUDIT_PPM: Final = 10_000
"""Groups of strangers that the canary computes, in millionths."""

_AT_ONCE: Final = 4  # miners whose groups are being read


@dataclass(frozen=True)
class CanaryAudit:
    """Computes the log-probabilities of picked groups, window after window.

    Attributes:
        node, task, engine: of the canary.
        trainer: the key whose secret picks groups.
        trainer_state: where the log-probabilities are noted.
        shares_of: by which the groups of a version draw their strata.
        share_ppm: of the groups that are picked, in millionths.
    """

    node: Node
    task: Task
    engine: Engine
    trainer: SigningKey
    trainer_state: ObjectStore
    shares_of: SharesOf
    share_ppm: int = AUDIT_PPM

    async def run(self) -> None:
        """Audit until cancelled."""
        node, window = self.node, -1
        while True:
            window = await node.next_window(window)
            await node.clock.sleep_until(node.run.deadline_time(window))
            try:
                await self._audit(window)
            except (StoreError, BeaconError, EngineError) as error:
                node.telemetry.event("commitments-unread", window=window, error=str(error))

    async def _audit(self, window: int) -> None:
        node, version = self.node, self.engine.version
        randomness = await node.randomness(node.run.schedule.opening(window))
        picked: dict[bytes, list[int]] = {}
        for item in await find_participants(node, "miner"):
            if item.version == version and item.key != node.key.public:
                indices = range(min(item.groups, node.run.groups))
                picked[item.key] = [index for index in indices if self._picks(window, item.key, index)]

        async def audit(miner: bytes) -> None:
            try:
                await self._audit_miner(window, randomness, miner, picked[miner])
            except NotFoundError:
                return
            except (StoreError, ProtocolError, TooLargeError) as error:
                node.telemetry.event("commitment-unread", miner=miner.hex(), window=window, error=str(error))

        await gather(audit, [miner for miner, indices in picked.items() if indices], at_once=_AT_ONCE)

    def _picks(self, window: int, miner: bytes, index: int) -> bool:
        coin = self.trainer.derive("audit coin", window, int.from_bytes(miner[:8], "little"), index)
        return int.from_bytes(coin[:4], "little") * 1_000_000 < self.share_ppm << 32

    async def _audit_miner(self, window: int, randomness: bytes, miner: bytes, indices: list[int]) -> None:
        """Note the log-probabilities of picked groups that a miner has committed to."""
        commitment = (await fetch_record(self.node, Commitment, paths.commitment(miner, window))).record
        path = paths.batch(miner, window, commitment.batch)
        for index in indices:
            if index < len(commitment.groups):
                offset, size = commitment.extent(index)
                frame = await self.node.store.get(path, size, offset=offset, size=size)
                group = open_group(frame, commitment, index, self.node.run.group_bytes)
                arithmetic, shares = commitment.arithmetic, self.shares_of
                await note_logprobs(self.task, self.engine, group, arithmetic, randomness, self.trainer_state, shares)
