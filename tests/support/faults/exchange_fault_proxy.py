"""An HTTP proxy that injects the faults of services into exchanges, between a node and a real S3 service.

It reads whole requests and responses, so that it can change listings and ETags, return old objects and repeat requests.
bench/fault_proxy.py injects faults of the network, and forwards bodies of any size piece by piece.
"""

import random
import re
from dataclasses import replace
from enum import Enum
from typing import Final

import httpx
import trio

from tests.support.faults.faulty_store import Fault, alter_bytes, alter_listing
from tests.support.servers.loopback import HttpRequest, Reply, serve

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
