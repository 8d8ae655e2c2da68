"""A validator that reads pledges and commitments, while an attacker controls miners or storage."""

from dataclasses import replace
from typing import Any

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.identity.participant import Announcement
from protocol.identity.signing import SigningKey, sign
from protocol.rollout.batch import Commitment, assemble
from roles.node.identity import Node
from roles.validator.window_cases import Pledge, Pledges, WindowCases, read_window_cases
from tests.support.attacked_nodes.trainer import FIRST, WINDOW, AttackedTrainer
from tests.support.builders import samples
from tests.support.builders.chains import MINER, make_node
from tests.support.simulation.network import Log

HOUR_MS = 3_600_000
PLEDGE = Pledge(groups=2, version=0, arithmetic="torch-float32")


class AttackedValidator(AttackedTrainer):
    """A validator that reads pledges and commitments."""

    def __init__(self) -> None:
        super().__init__()
        self.validator: Node = make_node(
            self.run_id, self.run, self.store, MemoryStore(), Log("validator"), FIRST, clock=self.clock
        )
        self.pledges = Pledges(self.validator)

    def announcement(self, miner: SigningKey = MINER, **changes: Any) -> Announcement:
        """Return the announcement of a pledge of two groups, valid for an hour."""
        fields: dict[str, Any] = {
            "run": self.run_id,
            "key": miner.public,
            "space": "",
            "groups": 2,
            "version": 0,
            "expires_ms": int(self.clock.now() * 1000) + HOUR_MS,
        }
        return samples.announcement(**(fields | changes))

    def validator_of_few(self, miners: int) -> Node:
        """Return the validator in a run that admits so many miners."""
        admission = self.run.authority.admission.model_copy(update={"miners": miners})
        authority = self.run.authority.model_copy(update={"admission": admission})
        run = self.run.model_copy(update={"authority": authority})
        return replace(self.validator, run=run)

    async def announce(self, miner: SigningKey = MINER, signer: SigningKey | None = None, **changes: Any) -> None:
        """Put a pledge at the miner's path."""
        data = sign(self.announcement(miner, **changes), signer or miner)
        await self.store.put(paths.participant(miner.public), data)

    async def commit(self, signer: SigningKey = MINER, **changes: Any) -> Commitment:
        """Put a commitment at the miner's path, and return it."""
        commitment = assemble(self.groups, "torch-float32")[1].model_copy(update=changes)
        await self.store.put(paths.commitment(MINER.public, WINDOW), sign(commitment, signer))
        return commitment

    async def read_cases(self) -> WindowCases:
        """Return the window's cases if the miner has pledged two groups."""
        return await read_window_cases(self.validator, WINDOW, {MINER.public: PLEDGE})

    async def pledged_groups(self) -> dict[bytes, int]:
        """Read the pledges, and return the groups of each miner."""
        return {miner: pledge.groups for miner, pledge in (await self.pledges.read()).items()}
