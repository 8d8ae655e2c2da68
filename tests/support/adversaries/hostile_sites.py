"""Sites that harm rounds, as real processes: `python -m tests.support.adversaries.hostile_sites KIND RUN.toml NAME`.

`liar` trains as an honest site does, and publishes wrong products of spread rounds. `copy-payload VICTIM` and
`copy-record VICTIM` train nothing: they publish what another site, named by its key in hex, sends in each round as
their own, as soon as storage shows its payload or its record.
"""

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import trio

from grailnode.node import bodies, processes
from grailnode.node.early_fork import start_fork_server
from grailnode.node.process_launch import Launch
from grailnode.node.run_model import genesis_reader, policy_directory
from grailnode.node.supervisor import ProcessSpec, Supervisor, run_until_interrupted
from grailnode.run.joining import open_config
from protocol import paths
from protocol.identity.signing import Signed, SigningKey, open_signed, sign
from protocol.outer.round_records import PayloadRef, RoundContribution, RoundManifest, RoundProducts
from protocol.pseudogradient import parts_of, read_head
from roles.authority_updates import under_authority
from roles.gather import STORAGE_ERRORS
from roles.node.identity import Node
from roles.ports import ObjectStore
from roles.records import fetch_object, fetch_record
from roles.trainer.outer.round_reader import fetch_manifest, fetch_pointer
from roles.trainer.spool import checked_genesis
from tests.support.faults.decorated_store import DecoratedStore

Bend = Callable[[RoundProducts], RoundProducts | None]

LOOK_SECONDS: Final = 0.05


class BentStore(DecoratedStore):
    """A store on which a site's products are replaced, or not shown to the others at all."""

    def __init__(self, inner: ObjectStore, key: SigningKey, bend: Bend) -> None:
        super().__init__(inner)
        self._key, self._bend = key, bend
        self._own: dict[str, bytes] = {}

    async def put(self, path: str, data: bytes) -> None:
        if "/products/" not in path:
            await super().put(path, data)
            return
        self._own[path] = data
        bent = self._bend(open_signed(data, RoundProducts, [self._key.public]).record)
        if bent is not None:
            await super().put(path, sign(bent, self._key))

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        return self._own.get(path) or await super().get(path, max_bytes, offset=offset, size=size)


def changed(record: RoundProducts, *factors: float) -> RoundProducts:
    """Return products of which those of each contribution, or all, are multiplied by a factor."""
    numbers = np.frombuffer(record.numbers, "<f8")
    return record.model_copy(update={"numbers": (numbers * np.resize(factors, numbers.size)).tobytes()})


async def lie(node: Node, launch: Launch) -> None:
    """Train as an honest site does, and make all products a little wrong."""
    store = BentStore(node.store, node.key, lambda own: changed(own, 1 + 1e-12))
    await bodies.train(replace(node, store=store), launch)


async def copy(node: Node, launch: Launch, victim: bytes, *, waits: bool) -> None:
    """Publish each contribution of a site as this one's own.

    Args:
        waits: for the site's record. Else the copy is made of the payload alone, which is uploaded before the record.
    """
    genesis = checked_genesis(node.run, genesis_reader(launch.config, node.run, policy_directory(launch.config)))
    parts = parts_of({name: tensor.shape for name, tensor in genesis.items()})
    prefix = paths.kind_prefix(victim, "payloads")
    seen = {item.path async for item in node.store.list(prefix)}
    opening: Signed[RoundManifest] | None = None
    copied = -1

    async def payload_of(number: int) -> PayloadRef | None:
        if waits:
            return (await fetch_record(node, RoundContribution, paths.contribution(victim, number))).record.payload
        async for item in node.store.list(prefix):
            if item.path not in seen and (digest := paths.content_digest_in(item.path)):
                seen.add(item.path)
                return PayloadRef(digest=digest, size=item.size, total=item.size)
        return None

    async with under_authority(node), trio.open_nursery() as nursery:
        nursery.start_soon(node.keep_announced, "worker", 600.0)
        while True:
            await trio.sleep(LOOK_SECONDS)
            try:
                number = (await fetch_pointer(node)).newest + 1
                if opening is None or opening.record.number + 1 != number:
                    opening = await fetch_manifest(node, number - 1)
                if number == copied or (ref := await payload_of(number)) is None:
                    continue
                payload = await fetch_object(node, paths.payload(victim, number, ref.digest), ref)
                record = RoundContribution(
                    run=node.run_id,
                    worker=node.key.public,
                    number=number,
                    opening=opening.digest,
                    state=opening.record.state,
                    payload=ref,
                    groups=(),
                    local_steps=opening.record.rules.local_steps,
                    norm=read_head(payload, parts).squared_norm ** 0.5,
                    feedback=b"",
                    beacon_round=opening.record.beacon_round,
                )
                await node.store.put(record.path, sign(record, node.key))
                await node.store.put(paths.payload(node.key.public, number, ref.digest), payload)
            except STORAGE_ERRORS:
                continue  # there is nothing yet
            node.telemetry.event("copied", number=number)
            copied = number


KINDS: Final[dict[str, Callable[..., Awaitable[None]]]] = {
    "liar": lie,
    "copy-payload": partial(copy, waits=False),
    "copy-record": partial(copy, waits=True),
}


def run_kind(launch: Launch, kind: str, keys: Sequence[str]) -> None:
    """Run the process until it is stopped."""
    processes.main(launch, lambda node, launch: KINDS[kind](node, launch, *map(bytes.fromhex, keys)))


def main() -> None:
    """Keep the process running, as a node's program does."""
    start_fork_server()
    kind, run, name, *keys = sys.argv[1:]
    spec = ProcessSpec(f"{name}/site", run_kind, (Launch(open_config(run), "site", name), kind, keys))
    run_until_interrupted(partial(Supervisor(print).keep, [spec]))


if __name__ == "__main__":
    main()
