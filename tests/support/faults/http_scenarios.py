"""A short life of one writer and reader at a real S3 service behind bad HTTP: what it says, and what is there
afterwards.
"""

import hashlib
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import trio

from grailnode.store.decorators.bounded import BoundedStore
from grailnode.store.decorators.retrying import RetryingStore, RetryPolicy
from grailnode.store.s3.s3_session import S3Credentials, S3Location
from grailnode.store.s3.s3_store import S3Store
from protocol.limits import MIB
from roles.ports import NotFoundError, ObjectInfo, ObjectStore, StoreError
from tests.support.builders.chains import MINER, make_node, small_run
from tests.support.faults.http_fault_proxy import FaultProxy, HttpFault, befalls_puts
from tests.support.simulation.network import Log

REFUSED: Final = "a refused connection"
NO_NAME: Final = "a name that DNS does not know"
HTTP_TROUBLES: Final = (*(fault.value for fault in HttpFault), REFUSED, NO_NAME)
"""Everything that can go wrong between a node and an S3 service, by name."""

_ENDPOINTS: Final = {REFUSED: "http://127.0.0.1:1", NO_NAME: "http://no-such-host.invalid"}
_RATE: Final = 0.25  # of each trouble, of the exchanges that it can befall
_PATIENCE: Final = RetryPolicy(attempts=5, first_pause=0.02, longest_pause=0.1, deadline=20.0)
_OBJECTS: Final = 12
_LARGE: Final = 6 * MIB  # goes up in two parts
_LISTINGS: Final = 10
_MOST_LISTED: Final = 500


@dataclass
class HttpOutcome:
    """What became of one life.

    Attributes:
        struck: exchanges that were bent or broken; told: failures that the node's stores ended in, one line each.
        refused: answers whose bytes were not those of the digest; violations: what must not happen.
    """

    struck: int
    told: list[str]
    refused: int
    violations: list[str]


class _Elsewhere:
    """Sends some of the operations to endpoints where nobody is."""

    def __init__(self, store: ObjectStore, others: list[ObjectStore], rng: random.Random) -> None:
        self._store = store
        self._others = others
        self._rng = rng
        self.stormy = True
        self.struck = 0

    def _chosen(self) -> ObjectStore:
        for other in self._others:
            if self.stormy and self._rng.random() < _RATE:
                self.struck += 1
                return other
        return self._store

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put."""
        await self._chosen().put(path, data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get."""
        return await self._chosen().get(path, max_bytes, offset=offset, size=size)

    async def delete(self, path: str) -> None:
        """Implements ObjectStore.delete."""
        await self._chosen().delete(path)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list."""
        async for info in self._chosen().list(prefix, after=after):
            yield info


async def live_over_http(location: S3Location, credentials: S3Credentials, names: tuple[str, ...]) -> HttpOutcome:
    """Write, read, list and delete in a bucket while these troubles strike, then look in calm weather."""
    assert location.endpoint is not None
    seed = int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:4], "little")
    faults = [fault for fault in HttpFault if fault.value in names]
    proxy = FaultProxy(location.endpoint, faults, _RATE, random.Random(seed))
    async with trio.open_nursery() as nursery:
        url = await nursery.start(proxy.run)
        near = replace(
            location,
            endpoint=url,
            part_bytes=5 * MIB,
            read_timeout=1.0,
            base_seconds=2.0,
            min_rate=4e6,
            connect_timeout=1.0,
        )
        with _opened(
            [near, *(replace(near, endpoint=_ENDPOINTS[n]) for n in names if n in _ENDPOINTS)], credentials
        ) as all_:
            elsewhere = _Elsewhere(all_[0], list(all_[1:]), random.Random(seed + 1))
            retrying = RetryingStore(elsewhere, random.Random(seed + 2), _PATIENCE)
            store = BoundedStore(retrying, _MOST_LISTED)
            life = _Life(store, f"life-{seed:08x}/", random.Random(seed + 3), large=any(map(befalls_puts, faults)))
            await life.storm()
            proxy.stormy = elsewhere.stormy = False
            await life.calm()
        nursery.cancel_scope.cancel()
    return HttpOutcome(proxy.struck + elsewhere.struck, life.told, life.refused, life.violations)


@contextmanager
def _opened(locations: list[S3Location], credentials: S3Credentials) -> Iterator[list[S3Store]]:
    stores = [S3Store(location, credentials) for location in locations]
    yield stores
    for store in stores:
        store.close()


class _Life:
    """One participant's objects, as a node writes and reads them: read back when written, believed by digest alone."""

    def __init__(self, store: ObjectStore, prefix: str, rng: random.Random, *, large: bool) -> None:
        run_id, run = small_run(bytes(32))
        self._log = Log("life")
        self._node = make_node(run_id, run, store, store, self._log, MINER)  # type: ignore[arg-type]
        self._store = store
        self._prefix = prefix
        self._bodies = {f"{prefix}{number:02}": rng.randbytes(2000 + number) for number in range(_OBJECTS)}
        if large:
            self._bodies[f"{prefix}large"] = rng.randbytes(_LARGE)
        self._deleted: set[str] = set()
        self._head = f"{prefix}head"
        self.refused = 0
        self.violations: list[str] = []
        self._failures: list[str] = []

    @property
    def told(self) -> list[str]:
        """Every line that an operation ended in."""
        return self._failures + [str(fields["error"]) for _, fields in self._log.events if "error" in fields]

    async def storm(self) -> None:
        """Publish everything, a pointer again and again; then read, list and delete."""
        for path, data in self._bodies.items():
            await self._node.publish(path, data)
            await self._node.publish(self._head, path.encode())
        for path in self._bodies:
            await self._read(path)
        for _ in range(_LISTINGS):
            await self._attempt(self._list())
        for path in list(self._bodies)[:3]:
            if await self._attempt(self._store.delete(path)):
                self._deleted.add(path)
        for line in self.told:
            if "\n" in line or not line:
                self.violations.append(f"not one clear line: {line!r}")

    async def calm(self) -> None:
        """Everything that was acknowledged and shown is there, the pointer works again, and the listing names all of
        it.
        """
        for path in self._deleted:
            await self._store.delete(path)  # a duplicate of an older put may have come after the delete
        there = {path: data for path, data in self._bodies.items() if path not in self._deleted}
        for path, data in there.items():
            if await self._store.get(path, len(data)) != data:
                self.violations.append(f"lost: {path}")
        await self._node.publish(self._head, b"calm")
        if await self._store.get(self._head, 100) != b"calm":
            self.violations.append("the pointer is not what was put last")
        if {*await self._list()} != {*there, self._head}:
            self.violations.append("the listing is not what was put")

    async def _read(self, path: str) -> None:
        """Read until the bytes are those of the digest, a few times, as followers do."""
        for _ in range(3):
            try:
                if await self._store.get(path, len(self._bodies[path])) == self._bodies[path]:
                    return
                self.refused += 1
            except StoreError as error:
                self._failures.append(str(error))

    async def _list(self) -> list[str]:
        return [info.path async for info in self._store.list(self._prefix)]

    async def _attempt(self, action: object) -> bool:
        try:
            await action  # type: ignore[misc]
        except NotFoundError:
            return True
        except StoreError as error:
            self._failures.append(str(error))
            return False
        return True
