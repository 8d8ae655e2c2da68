"""Scenarios of one node that writes and reads at a real S3 service while HTTP faults occur, and what they leave."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import trio

from grailnode.store.decorators.limiting import BoundedStore
from grailnode.store.decorators.retrying import RetryingStore, RetryPolicy
from grailnode.store.place import PlaceSection
from grailnode.store.s3.s3_session import S3Credentials
from grailnode.store.s3.s3_store import S3Store
from protocol.limits import MIB
from roles.node.retries import Pause
from roles.ports import NotFoundError, ObjectStore, StoreError
from tests.support.builders.chains import MINER, make_node, small_run
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.faults.exchange_fault_proxy import ExchangeFault, ExchangeFaultProxy, affects_puts
from tests.support.simulation.network import Log

CONNECTION_REFUSED: Final = "a refused connection"
UNKNOWN_HOST: Final = "a name that DNS does not know"
HTTP_FAULTS: Final = (*(fault.value for fault in ExchangeFault), CONNECTION_REFUSED, UNKNOWN_HOST)
"""The names of all faults between a node and an S3 service."""

_ENDPOINTS: Final = {CONNECTION_REFUSED: "http://127.0.0.1:1", UNKNOWN_HOST: "http://no-such-host.invalid"}
_RATE: Final = 0.25  # of each fault, in the exchanges that it can affect
_RETRIES: Final = RetryPolicy(attempts=5, pause=Pause(0.02, 0.1), deadline=20.0)
_OBJECTS: Final = 12
_LARGE_BYTES: Final = 6 * MIB  # uploaded in two parts
_LISTINGS: Final = 10
_MAX_ENTRIES: Final = 500


@dataclass
class HttpOutcome:
    """The result of one scenario.

    Attributes:
        fault_count: exchanges with a fault.
        errors: messages of the operations that failed.
        wrong_reads: responses whose bytes did not have the digest of the object.
        violations: descriptions of what must not happen.
    """

    fault_count: int
    errors: list[str]
    wrong_reads: int
    violations: list[str]


class _PartlyUnreachableStore(DecoratedStore):
    """Sends some operations to endpoints where no server is.

    Attributes:
        active: whether it does so.
        fault_count: operations that were sent there.
    """

    def __init__(self, store: ObjectStore, others: list[ObjectStore], rng: random.Random) -> None:
        super().__init__(store)
        self._store = store
        self._others = others
        self._rng = rng
        self.active = True
        self.fault_count = 0

    async def before(self, operation: str, path: str) -> None:
        self.inner = self._store
        for other in self._others:
            if self.active and self._rng.random() < _RATE:
                self.fault_count += 1
                self.inner = other
                return


async def run_http_scenario(place: PlaceSection, credentials: S3Credentials, names: tuple[str, ...]) -> HttpOutcome:
    """Write, read, list and delete in a bucket while faults occur; then check the bucket without faults.

    Args:
        place: the bucket, with an endpoint.
        names: of the faults (HTTP_FAULTS).
    """
    seed = int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:4], "little")
    faults = [fault for fault in ExchangeFault if fault.value in names]
    proxy = ExchangeFaultProxy(place.endpoint, faults, _RATE, random.Random(seed))
    async with trio.open_nursery() as nursery:
        url = await nursery.start(proxy.run)
        limits = {"silence_seconds": 1.0, "deadline_seconds": 2.0, "min_bytes_per_second": 4e6, "connect_seconds": 1.0}
        endpoints = [url, *(_ENDPOINTS[name] for name in names if name in _ENDPOINTS)]
        places = [place.model_copy(update=limits | {"endpoint": endpoint}) for endpoint in endpoints]
        with _open_stores(places, credentials) as (first, *others):
            partly_unreachable = _PartlyUnreachableStore(first, list(others), random.Random(seed + 1))
            retrying = RetryingStore(partly_unreachable, random.Random(seed + 2), _RETRIES)
            store = BoundedStore(retrying, _MAX_ENTRIES)
            client = _Client(
                store, f"client-{seed:08x}/", random.Random(seed + 3), large=any(map(affects_puts, faults))
            )
            await client.use_store()
            proxy.active = partly_unreachable.active = False
            await client.check_store()
        nursery.cancel_scope.cancel()
    fault_count = proxy.fault_count + partly_unreachable.fault_count
    return HttpOutcome(fault_count, client.errors, client.wrong_reads, client.violations)


@contextmanager
def _open_stores(places: list[PlaceSection], credentials: S3Credentials) -> Iterator[list[S3Store]]:
    stores = [S3Store(place, credentials, 5 * MIB) for place in places]
    yield stores
    for store in stores:
        store.close()


class _Client:
    """Writes and reads objects as a node does: it reads them back, and trusts their digests only.

    Attributes:
        wrong_reads, violations: as in HttpOutcome.
    """

    def __init__(self, store: ObjectStore, prefix: str, rng: random.Random, *, large: bool) -> None:
        run_id, run = small_run(bytes(32))
        self._log = Log("client")
        self._node = make_node(run_id, run, store, store, self._log, MINER)
        self._store = store
        self._prefix = prefix
        self._bodies = {f"{prefix}{number:02}": rng.randbytes(2000 + number) for number in range(_OBJECTS)}
        if large:
            self._bodies[f"{prefix}large"] = rng.randbytes(_LARGE_BYTES)
        self._deleted_paths: set[str] = set()
        self._head = f"{prefix}head"
        self.wrong_reads = 0
        self.violations: list[str] = []
        self._failures: list[str] = []

    @property
    def errors(self) -> list[str]:
        """Messages of all operations that failed."""
        return self._failures + [str(fields["error"]) for _, fields in self._log.events if "error" in fields]

    async def use_store(self) -> None:
        """Publish all objects, and a pointer after each; then read, list and delete."""
        for path, data in self._bodies.items():
            await self._node.publish(path, data)
            await self._node.publish(self._head, path.encode())
        for path in self._bodies:
            await self._read(path)
        for _ in range(_LISTINGS):
            await self._attempt(self._list())
        for path in list(self._bodies)[:3]:
            if await self._attempt(self._store.delete(path)):
                self._deleted_paths.add(path)
        for message in self.errors:
            if "\n" in message or not message:
                self.violations.append(f"not one line: {message!r}")

    async def check_store(self) -> None:
        """Check that all published objects exist, the pointer can be replaced, and the listing is complete."""
        for path in self._deleted_paths:
            await self._store.delete(path)  # a duplicate of an older put may have arrived after the delete
        expected = {path: data for path, data in self._bodies.items() if path not in self._deleted_paths}
        for path, data in expected.items():
            if await self._store.get(path, len(data)) != data:
                self.violations.append(f"lost: {path}")
        await self._node.publish(self._head, b"last")
        if await self._store.get(self._head, 100) != b"last":
            self.violations.append("the pointer is not what was put last")
        if {*await self._list()} != {*expected, self._head}:
            self.violations.append("the listing is not what was put")

    async def _read(self, path: str) -> None:
        """Read an object until its bytes are right, up to three times, as followers do."""
        for _ in range(3):
            try:
                if await self._store.get(path, len(self._bodies[path])) == self._bodies[path]:
                    return
                self.wrong_reads += 1
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
