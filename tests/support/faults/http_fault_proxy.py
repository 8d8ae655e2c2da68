"""A proxy between a node and a real S3 service that does to requests and answers what bad services and networks do."""

import random
import re
from dataclasses import replace
from enum import Enum
from typing import Final

import httpx
import trio

from tests.support.servers.loopback import Asked, Reply, serve

_CONTENTS: Final = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_PASSED_ON: Final = ("content-type", "etag", "content-range", "last-modified", "x-amz-request-id")


class HttpFault(Enum):
    """What can be done to one exchange."""

    INTERNAL = "500 InternalError"
    SLOW_DOWN = "503 SlowDown"
    TOO_MANY = "429 TooManyRequests"
    DENIED = "403 AccessDenied"
    MISSING = "404 of an existing key"
    CONFLICT = "409 OperationAborted"
    PRECONDITION = "412 PreconditionFailed"
    MOVED = "301 PermanentRedirect"
    ERROR_BODY = "200 with an error body, nothing done"
    WRONG_ETAG = "a wrong ETag"
    NO_ETAG = "no ETag"
    TRUNCATED = "a truncated object"
    EXTENDED = "extra bytes"
    FLIPPED = "a flipped bit"
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
    for fault in HttpFault
    if fault.value[:3].isdigit() and fault not in {HttpFault.MISSING, HttpFault.ERROR_BODY}
} | {HttpFault.MISSING: (404, "NoSuchKey")}
_OF_LISTS: Final = frozenset(fault for fault in HttpFault if fault.name.startswith("LIST_")) | {HttpFault.STALE_LIST}
_OF_READS: Final = frozenset(
    {HttpFault.MISSING, HttpFault.TRUNCATED, HttpFault.EXTENDED, HttpFault.FLIPPED, HttpFault.STALE_READ}
)


def befalls_puts(fault: HttpFault) -> bool:
    """Whether a fault can strike a put, or a part of one."""
    return fault not in _OF_LISTS | _OF_READS | {HttpFault.RESET_GET, HttpFault.DRIP}


class FaultProxy:
    """Forwards to a service, and strikes with each of its faults at a rate while it is stormy.

    Attributes:
        stormy: set to False for calm weather; struck: how many exchanges were bent or broken.
    """

    def __init__(self, upstream: str, faults: list[HttpFault], rate: float, rng: random.Random) -> None:
        self._upstream = upstream
        self._faults = faults
        self._rate = rate
        self._rng = rng
        self._client = httpx.AsyncClient(timeout=30.0)
        self._first: dict[str, Reply] = {}
        self.stormy = True
        self.struck = 0

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; reports its URL."""
        async with self._client:
            await serve(self._answer, task_status=task_status)

    async def _answer(self, asked: Asked) -> Reply:
        fault = self._choose(asked)
        if fault is None:
            return self._remember(asked, await self._forward(asked))
        self.struck += 1
        if fault in _STATUS:
            return _refusal(*_STATUS[fault])
        if fault is HttpFault.ERROR_BODY:
            return replace(_refusal(500, "InternalError"), status=200)
        if fault is HttpFault.RESET_PUT:
            return Reply(cut=-1)
        if fault is HttpFault.TWICE:
            await self._forward(asked)
        reply = self._remember(asked, await self._forward(asked))
        if fault is HttpFault.LOST_ANSWER:
            await trio.sleep(3600)
        return self._bend(asked, reply, fault)

    def _choose(self, asked: Asked) -> HttpFault | None:
        """The fault that strikes an exchange; only those that can."""
        listing, reading = "list-type=2" in asked.target, asked.method == "GET"
        for fault in self._faults:
            fits = listing if fault in _OF_LISTS else reading and not listing if fault in _OF_READS else True
            fits = fits and (fault is not HttpFault.RESET_PUT or asked.method == "PUT")
            fits = fits and (fault not in {HttpFault.RESET_GET, HttpFault.DRIP} or reading)
            if self.stormy and fits and self._rng.random() < self._rate:
                return fault
        return None

    def _remember(self, asked: Asked, reply: Reply) -> Reply:
        if asked.method == "GET" and reply.status == 200:
            self._first.setdefault(asked.target, reply)
        return reply

    def _bend(self, asked: Asked, reply: Reply, fault: HttpFault) -> Reply:
        body, place = reply.body, self._rng.randrange(max(1, len(reply.body)))
        if fault in {HttpFault.STALE_READ, HttpFault.STALE_LIST}:
            return self._first.get(asked.target, reply)
        if fault in _OF_LISTS:
            return replace(reply, body=_bend_list(body, fault, self._rng))
        if fault is HttpFault.WRONG_ETAG and "etag" in reply.headers:
            return replace(reply, headers=reply.headers | {"etag": f'"{self._rng.randbytes(16).hex()}"'})
        if fault is HttpFault.NO_ETAG:
            return replace(reply, headers={name: value for name, value in reply.headers.items() if name != "etag"})
        if fault is HttpFault.TRUNCATED:
            return replace(reply, body=body[:place])
        if fault is HttpFault.EXTENDED:
            return replace(reply, body=body + self._rng.randbytes(1 + place % 64))
        if fault is HttpFault.FLIPPED and body:
            return replace(reply, body=body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :])
        if fault is HttpFault.RESET_GET:
            return replace(reply, cut=place)
        if fault is HttpFault.DRIP:
            return replace(reply, piece=1, pause=1.0)
        return reply

    async def _forward(self, asked: Asked) -> Reply:
        url = httpx.URL(self._upstream).copy_with(raw_path=asked.target.encode("latin-1"))
        headers = {name: value for name, value in asked.headers.items() if name not in {"connection", "expect"}}
        answer = await self._client.request(asked.method, url, headers=headers, content=asked.body)
        kept = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
        return Reply(answer.status_code, answer.content, kept)


def _refusal(status: int, code: str) -> Reply:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
    return Reply(status, body.encode(), {"Content-Type": "application/xml"})


def _bend_list(body: bytes, fault: HttpFault, rng: random.Random) -> bytes:
    entries = _CONTENTS.findall(body)
    bare = _CONTENTS.sub(b"", body)
    if fault is HttpFault.LIST_GAPS:
        entries = [entry for entry in entries if rng.random() < 0.7]
    elif fault is HttpFault.LIST_TWICE:
        entries = [copy for entry in entries for copy in [entry] * rng.choice((1, 2))]
    elif fault is HttpFault.LIST_SHUFFLED:
        rng.shuffle(entries)
    else:
        token = b"<NextContinuationToken>again</NextContinuationToken>"
        bare = bare.replace(b"<IsTruncated>false</IsTruncated>", b"<IsTruncated>true</IsTruncated>" + token)
    return bare.replace(b"</ListBucketResult>", b"".join(entries) + b"</ListBucketResult>")
