"""What miner and validator do with the weights they follow: keep looking for newer ones, and have the engine serve them."""

import trio

from protocol.errors import ProtocolError
from roles.follower import Follower, Held
from roles.node import Node
from roles.ports import Engine, StoreError


async def serve(node: Node, engine: Engine, held: Held) -> None:
    """Have the engine serve these weights.

    Raises:
        EngineError: it cannot; it still serves what it served.
    """
    if engine.version != held.version:
        await engine.stage(held.version, held.weights)
        await engine.commit()
        node.telemetry.event("serving", version=held.version, weights=held.digest.hex())


async def keep_fresh(node: Node, follower: Follower, poll_seconds: float) -> None:
    """Refresh a follower for ever. A failure is told once, and again when it changes."""
    told = ""
    while True:
        try:
            await follower.refresh()
            if follower.newest is None and follower.chain.head is not None:
                await follower.hold(_first_version(node, follower))
            told = ""
        except (StoreError, ProtocolError) as error:
            if str(error) != told:
                node.telemetry.event("cannot-follow", error=str(error))
            told = str(error)
        await trio.sleep(poll_seconds)


def _first_version(node: Node, follower: Follower) -> int:
    """The version to rebuild before the first window asks for one: the one that serves now, so that it starts at once."""
    return follower.version_for(max(0, node.window()))
