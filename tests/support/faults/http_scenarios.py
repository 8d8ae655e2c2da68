"""Scenarios of one node that uses a real S3 service behind a proxy that injects the faults of services, and their ends.

The proxy reads whole requests and responses, so that it can change listings and ETags, return old objects and repeat
requests. bench/fault_proxy.py injects faults of the network, and forwards bodies of any size piece by piece.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

import httpx
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
from tests.support.faults.faulty_store import Fault, alter_bytes, alter_listing
from tests.support.servers.loopback import HttpRequest, Reply, serve
from tests.support.simulation.network import Log

_CONTENTS: Final = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_FORWARDED_HEADERS: Final = ("content-type", "etag", "content-range", "last-modified", "x-amz-request-id")


class ExchangeFault(Enum):
    """What can happen to a request and its response."""

    INTERNAL = "500 InternalError"
    SLOW_DOWN = "503 SlowDown"
    TOO_MANY = "429 TooManyRequests"
    DENIED = "403 AccessDenied"
    NOT_FOUND = "404 of an existing key"
    CONFLICT = "409 OperationAborted"
    PRECONDITION = "412 PreconditionFailed"
    REDIRECT = "301 PermanentRedirect"
    ERROR_BODY = "200 with an error body, nothing done"
    WRONG_ETAG = "a wrong ETag"
    NO_ETAG = "no ETag"
    TRUNCATION = "a truncated object"
    EXTRA_BYTES = "extra bytes"
    BIT_FLIP = "a flipped bit"
    STALE_READ = "a stale read"
    STALE_LIST = "a stale listing"
    LIST_GAPS = "a listing with gaps"
    LIST_TWICE = "a listing with duplicates"
    LIST_SHUFFLED = "a listing out of order"
    LIST_ENDLESS = "an endless list token"
    LOST_ANSWER = "a timeout after the commit"
    TWICE = "a request delivered twice"
    RESET_PUT = "a reset in a put"
    RESET_GET = "a reset in a get"
    DRIP = "1 byte a second"


_STATUS: Final = {
    fault: (int(fault.value[:3]), fault.value[4:])
    for fault in ExchangeFault
    if fault.value[:3].isdigit() and fault not in {ExchangeFault.NOT_FOUND, ExchangeFault.ERROR_BODY}
} | {ExchangeFault.NOT_FOUND: (404, "NoSuchKey")}
_OF_LISTS: Final = frozenset(fault for fault in ExchangeFault if fault.name.startswith("LIST_")) | {
    ExchangeFault.STALE_LIST
}
_OF_READS: Final = frozenset(
    {
        ExchangeFault.NOT_FOUND,
        ExchangeFault.TRUNCATION,
        ExchangeFault.EXTRA_BYTES,
        ExchangeFault.BIT_FLIP,
        ExchangeFault.STALE_READ,
    }
)


def affects_puts(fault: ExchangeFault) -> bool:
    """Return whether a fault can affect a put, or a part of one."""
    return fault not in _OF_LISTS | _OF_READS | {ExchangeFault.RESET_GET, ExchangeFault.DRIP}


class ExchangeFaultProxy:
    """Forwards requests to a service, and injects faults while it is active.

    Args:
        upstream: URL of the service.
        faults: the faults that can occur.
        rate: probability of each fault, in exchanges that it can affect.

    Attributes:
        active: whether faults occur.
        fault_count: exchanges with a fault so far.
    """

    def __init__(self, upstream: str, faults: list[ExchangeFault], rate: float, rng: random.Random) -> None:
        self._upstream = upstream
        self._faults = faults
        self._rate = rate
        self._rng = rng
        self._client = httpx.AsyncClient(timeout=30.0)
        self._first: dict[str, Reply] = {}
        self.active = True
        self.fault_count = 0

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. The task status receives the proxy's URL."""
        async with self._client:
            await serve(self._answer, task_status=task_status)

    async def _answer(self, request: HttpRequest) -> Reply:
        fault = self._choose(request)
        if fault is None:
            return self._remember(request, await self._forward(request))
        self.fault_count += 1
        if fault in _STATUS:
            return _refusal(*_STATUS[fault])
        if fault is ExchangeFault.ERROR_BODY:
            return replace(_refusal(500, "InternalError"), status=200)
        if fault is ExchangeFault.RESET_PUT:
            return Reply(cut=-1)
        if fault is ExchangeFault.TWICE:
            await self._forward(request)
        reply = self._remember(request, await self._forward(request))
        if fault is ExchangeFault.LOST_ANSWER:
            await trio.sleep(3600)
        return self._apply(request, reply, fault)

    def _choose(self, request: HttpRequest) -> ExchangeFault | None:
        """Return the fault of an exchange, among those that can affect it; None for no fault."""
        listing, reading = "list-type=2" in request.target, request.method == "GET"
        for fault in self._faults:
            fits = listing if fault in _OF_LISTS else reading and not listing if fault in _OF_READS else True
            fits = fits and (fault is not ExchangeFault.RESET_PUT or request.method == "PUT")
            fits = fits and (fault not in {ExchangeFault.RESET_GET, ExchangeFault.DRIP} or reading)
            if self.active and fits and self._rng.random() < self._rate:
                return fault
        return None

    def _remember(self, request: HttpRequest, reply: Reply) -> Reply:
        if request.method == "GET" and reply.status == 200:
            self._first.setdefault(request.target, reply)
        return reply

    def _apply(self, request: HttpRequest, reply: Reply, fault: ExchangeFault) -> Reply:
        if fault in {ExchangeFault.STALE_READ, ExchangeFault.STALE_LIST}:
            return self._first.get(request.target, reply)
        if fault in _OF_LISTS:
            return replace(reply, body=_change_listing(reply.body, fault, self._rng))
        if fault is ExchangeFault.WRONG_ETAG and "etag" in reply.headers:
            return replace(reply, headers=reply.headers | {"etag": f'"{self._rng.randbytes(16).hex()}"'})
        if fault is ExchangeFault.NO_ETAG:
            return replace(reply, headers={name: value for name, value in reply.headers.items() if name != "etag"})
        if fault in {ExchangeFault.TRUNCATION, ExchangeFault.EXTRA_BYTES, ExchangeFault.BIT_FLIP}:
            return replace(reply, body=alter_bytes(reply.body, Fault[fault.name], self._rng))
        if fault is ExchangeFault.RESET_GET:
            return replace(reply, cut=self._rng.randrange(max(1, len(reply.body))))
        if fault is ExchangeFault.DRIP:
            return replace(reply, piece=1, pause=1.0)
        return reply

    async def _forward(self, request: HttpRequest) -> Reply:
        url = httpx.URL(self._upstream).copy_with(raw_path=request.target.encode("latin-1"))
        headers = {name: value for name, value in request.headers.items() if name not in {"connection", "expect"}}
        response = await self._client.request(request.method, url, headers=headers, content=request.body)
        headers = {name: response.headers[name] for name in _FORWARDED_HEADERS if name in response.headers}
        return Reply(response.status_code, response.content, headers)


def _refusal(status: int, code: str) -> Reply:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
    return Reply(status, body.encode(), {"Content-Type": "application/xml"})


def _change_listing(body: bytes, fault: ExchangeFault, rng: random.Random) -> bytes:
    entries: list[bytes] = _CONTENTS.findall(body)
    bare = _CONTENTS.sub(b"", body)
    if fault is ExchangeFault.LIST_ENDLESS:
        token = b"<NextContinuationToken>again</NextContinuationToken>"
        bare = bare.replace(b"<IsTruncated>false</IsTruncated>", b"<IsTruncated>true</IsTruncated>" + token)
    return bare.replace(
        b"</ListBucketResult>", b"".join(alter_listing(entries, Fault[fault.name], rng)) + b"</ListBucketResult>"
    )


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
        errors: messages of the operations that failed.
        wrong_reads: responses whose bytes did not have the digest of the object.
        violations: descriptions of what must not happen.
        fault_count: exchanges with a fault.
    """

    errors: list[str] = field(default_factory=list)
    wrong_reads: int = 0
    violations: list[str] = field(default_factory=list)
    fault_count: int = 0


class _PartlyUnreachableStore(DecoratedStore):
    """Sends some operations to endpoints where no server is.

    Attributes:
        active: whether it does so.
        fault_count: operations that were sent there.
    """

    def __init__(self, store: ObjectStore, others: Sequence[ObjectStore], rng: random.Random) -> None:
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
        with ExitStack() as stack:
            stores = [stack.enter_context(closing(S3Store(each, credentials, 5 * MIB))) for each in places]
            partly_unreachable = _PartlyUnreachableStore(stores[0], stores[1:], random.Random(seed + 1))
            retrying = RetryingStore(partly_unreachable, random.Random(seed + 2), _RETRIES)
            store = BoundedStore(retrying, _MAX_ENTRIES)
            client = _Client(
                store, f"client-{seed:08x}/", random.Random(seed + 3), large=any(map(affects_puts, faults))
            )
            await client.use_store()
            proxy.active = partly_unreachable.active = False
            await client.check_store()
        nursery.cancel_scope.cancel()
    client.outcome.fault_count = proxy.fault_count + partly_unreachable.fault_count
    return client.outcome


class _Client:
    """Writes and reads objects as a node does: it reads them back, and trusts their digests only."""

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
        self.outcome = HttpOutcome()

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

    async def check_store(self) -> None:
        """Check that all published objects exist, the pointer can be replaced, the listing is complete, and what failed
        said so in one line.
        """
        for path in self._deleted_paths:
            await self._store.delete(path)  # a duplicate of an older put may have arrived after the delete
        expected = {path: data for path, data in self._bodies.items() if path not in self._deleted_paths}
        for path, data in expected.items():
            if await self._store.get(path, len(data)) != data:
                self.outcome.violations.append(f"lost: {path}")
        await self._node.publish(self._head, b"last")
        if await self._store.get(self._head, 100) != b"last":
            self.outcome.violations.append("the pointer is not what was put last")
        if {*await self._list()} != {*expected, self._head}:
            self.outcome.violations.append("the listing is not what was put")
        self.outcome.errors += [str(fields["error"]) for _, fields in self._log.events if "error" in fields]
        lines = [message for message in self.outcome.errors if "\n" in message or not message]
        self.outcome.violations += [f"not one line: {line!r}" for line in lines]

    async def _read(self, path: str) -> None:
        """Read an object until its bytes are right, up to three times, as followers do."""
        for _ in range(3):
            try:
                if await self._store.get(path, len(self._bodies[path])) == self._bodies[path]:
                    return
                self.outcome.wrong_reads += 1
            except StoreError as error:
                self.outcome.errors.append(str(error))

    async def _list(self) -> list[str]:
        return [info.path async for info in self._store.list(self._prefix)]

    async def _attempt(self, action: object) -> bool:
        try:
            await action  # type: ignore[misc]
        except NotFoundError:
            return True
        except StoreError as error:
            self.outcome.errors.append(str(error))
            return False
        return True
