"""What is to be judged in a window: the commitments that lay in storage in time."""

from dataclasses import dataclass

from protocol import limits, paths
from protocol.errors import MalformedError, ProtocolError
from protocol.rollout import Commitment
from protocol.signing import Signed, open_signed
from roles.gather import gather
from roles.node import Node
from roles.participants import participants
from roles.ports import NotFoundError, StoreError


@dataclass(frozen=True)
class Case:
    """One miner's commitment, and when this validator saw it (seconds since the Unix epoch)."""

    commitment: Signed[Commitment]
    seen: float


async def docket(node: Node, window: int) -> list[Case]:
    """The commitments of a window. Whoever has none, or a broken one, is passed over; its groups do not exist.

    Raises:
        StoreError: the storage cannot be listed.
    """

    async def read(miner: bytes) -> Case | None:
        path = paths.commitment(miner, window)
        try:
            data = await node.store.get(path, limits.MAX_COMMITMENT_BYTES + limits.MAX_ENVELOPE_BYTES)
            signed = open_signed(data, Commitment, [miner])
            record = signed.record
            if (record.run, record.window, record.miner) != (node.run_id, window, miner) or not record.groups:
                raise MalformedError("of another run, window or miner, or empty", path)
            return Case(signed, node.clock.now())
        except NotFoundError:
            return None
        except (StoreError, ProtocolError) as error:
            node.telemetry.event("commitment-refused", miner=miner.hex(), window=window, error=str(error))
            return None

    miners = [announcement.key for announcement in await participants(node, "miner")]
    cases = await gather(read, miners)
    return [case for case in cases if case is not None]
