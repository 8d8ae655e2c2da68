"""Objects of a public bucket or CDN over HTTPS, to read only.

Readers learn paths from signed indexes and from the protocol's own naming; a bucket's root URL is listed where the
bucket lists in public. One that does not answers 403 for an object that is not there, so 403 means the same as 404
(docs/adr/0210).
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final
from urllib.parse import quote, urlsplit

import httpx
import trio

from grailnode.store.https.addresses import PublicTransport
from grailnode.store.https.listing import list_bucket
from grailnode.store.names import check_path, check_prefix, check_range
from grailnode.store.permanent_error import PermanentError
from roles.ports import NotFoundError, ObjectInfo, StoreError, TooLargeError

_content_range: Final = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/(?:[0-9]{1,18}|\*)")
_strong_etag: Final = re.compile(r'"[\x21\x23-\x7e]{1,128}"')


@dataclass(frozen=True)
class TransferPatience:
    """How slow a server may be.

    Attributes:
        deadline: seconds that one object may take in all.
        grace: seconds before the rate counts.
        min_rate: bytes per second, over the whole transfer so far.
        resumptions: how often a transfer that broke off goes on from where it stopped, as long as it gets further.
    """

    deadline: float = 3600.0
    grace: float = 20.0
    min_rate: float = 16_384.0
    resumptions: int = 8


def open_client(
    *, connect: float = 10.0, silence: float = 20.0, connections: int = 32, public_only: bool = False
) -> httpx.AsyncClient:
    """An HTTP client for HttpsStore: no redirects, no cookies, nothing from the environment.

    Args:
        connect: seconds for a connection.
        silence: seconds without a byte.
        connections: at a time.
        public_only: connect to public addresses alone, for URLs that strangers name.
    """
    return httpx.AsyncClient(
        transport=PublicTransport(connections) if public_only else None,
        follow_redirects=False,
        trust_env=False,
        # a server could otherwise mark its readers, and a cookie that is not ASCII breaks every later request
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        timeout=httpx.Timeout(silence, connect=connect, pool=None),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        headers={"User-Agent": "grailnode", "Accept-Encoding": "identity"},
    )


@dataclass
class _Transfer:
    """An object, or a range of one, on its way: what was asked for and what has arrived."""

    path: str
    max_bytes: int
    offset: int
    size: int | None
    etag: str | None = None
    data: bytearray = field(default_factory=bytearray)

    def headers(self) -> dict[str, str]:
        """Ask for what is missing. Without an ETag the rest could belong to another object, so everything is."""
        if self.data and self.etag is None:
            self.data.clear()
        start = self.offset + len(self.data)
        last = "" if self.size is None else str(self.offset + max(self.size, 1) - 1)
        headers = {} if start == 0 and not last else {"Range": f"bytes={start}-{last}"}
        if self.data and self.etag is not None:
            headers["If-Range"] = self.etag
        return headers


class _BrokenOffError(StoreError):
    """The connection ended in the middle of the body."""


class HttpsStore:
    """The objects below a URL.

    Args:
        base_url: where the paths begin, such as 'https://bucket.example.org/run/'.
        client: from `open_client`; its owner closes it.
        pace: how slow the server may be.
        plain_http: allow 'http:', for relays and buckets on this machine or a trusted network.

    Raises:
        ValueError: not such a URL, or one with credentials, a query or a fragment in it.
    """

    def __init__(
        self,
        base_url: str,
        client: httpx.AsyncClient,
        *,
        pace: TransferPatience | None = None,
        plain_http: bool = False,
    ) -> None:
        schemes = {"https", "http"} if plain_http else {"https"}
        if not _is_base_url(base_url, schemes):
            raise ValueError(f"not a base URL ({' or '.join(sorted(schemes))}, a host, a path): {base_url!r}")
        self._base = base_url.rstrip("/") + "/"
        self._client = client
        self._pace = pace or TransferPatience()

    async def put(self, path: str, data: bytes) -> None:
        """Raises RefusedError: HTTPS is for reading."""
        raise PermanentError(f"{self._base}{check_path(path)}: not stored, HTTPS is for reading only")

    async def delete(self, path: str) -> None:
        """Raises RefusedError: HTTPS is for reading."""
        raise PermanentError(f"{self._base}{check_path(path)}: not deleted, HTTPS is for reading only")

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list, where the base is the root of a bucket that lists in public.

        Raises:
            RefusedError: it is not.
        """
        return list_bucket(self._client, self._base, check_prefix(prefix), after)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get; goes on from where a connection broke off while the object stays the same."""
        check_path(path)
        check_range(max_bytes, offset, size)
        transfer = _Transfer(path, max_bytes, offset, size)
        try:
            with trio.fail_after(self._pace.deadline):
                await self._resume_until_done(transfer)
        except trio.TooSlowError as error:
            raise StoreError(f"{self._base}{path}: not finished in {self._pace.deadline:g} s") from error
        return bytes(transfer.data if size is None else transfer.data[:size])

    async def _resume_until_done(self, transfer: _Transfer) -> None:
        furthest = 0
        for resumption in range(self._pace.resumptions + 1):
            try:
                await self._receive(transfer)
            except _BrokenOffError:
                if len(transfer.data) <= furthest or resumption == self._pace.resumptions:
                    raise
                furthest = len(transfer.data)
            else:
                return

    async def _receive(self, transfer: _Transfer) -> None:
        where = self._base + transfer.path
        began = False
        try:
            url = self._base + quote(transfer.path, safe="/")
            async with self._client.stream("GET", url, headers=transfer.headers()) as answer:
                if _accept(answer, transfer, where):
                    began = True
                    await self._read(answer, transfer, where)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            kind = _BrokenOffError if began else StoreError
            raise kind(f"{where}: {_one_line(error)}") from error

    async def _read(self, answer: httpx.Response, transfer: _Transfer, where: str) -> None:
        start, received = trio.current_time(), 0
        enough = None if transfer.size is None else max(transfer.size, 1)
        async for piece in answer.aiter_raw():
            received += len(piece)
            transfer.data += piece
            if enough is not None and len(transfer.data) >= enough:
                del transfer.data[enough:]  # a server that ignores the range's end
                break
            if len(transfer.data) > transfer.max_bytes:
                raise TooLargeError(f"{where}: more than {transfer.max_bytes} bytes")
            if trio.current_time() - start > self._pace.grace + received / self._pace.min_rate:
                raise StoreError(f"{where}: slower than {self._pace.min_rate:g} bytes per second")
        if transfer.size != 0 and len(transfer.data) > transfer.max_bytes:
            raise TooLargeError(f"{where}: more than {transfer.max_bytes} bytes")


def _is_base_url(url: str, schemes: set[str]) -> bool:
    """Return whether a URL has one of these schemes, a host, a port that exists, and no user, query or fragment."""
    try:
        parts = urlsplit(url)
        port = parts.port  # raises ValueError above 65535
    except ValueError:
        return False
    return (
        parts.scheme in schemes
        and bool(parts.hostname)
        and port != 0
        and not (parts.query or parts.fragment or parts.username)
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _accept(answer: httpx.Response, transfer: _Transfer, where: str) -> bool:
    """Whether a body follows that continues the transfer; the transfer starts over where the object has changed.

    Raises:
        StoreError: the server answered anything but the object or the range.
    """
    status = answer.status_code
    if status in {403, 404, 410}:
        raise NotFoundError(f"{where}: no such object{_hint.get(status, '')}")
    if status == 416 and not transfer.data:
        return False  # the range begins behind the end: nothing to read there
    if 300 <= status < 400:
        raise PermanentError(f"{where}: redirects are not followed ({status}): give the final URL")
    if status not in {200, 206}:
        raise StoreError(f"{where}: the server answered {status}{_hint.get(status, '')}")
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise StoreError(f"{where}: the server compresses what was asked for as it is")
    if status == 206 or "Content-Range" in answer.headers:  # some servers answer ranges with status 200
        match = _content_range.fullmatch(answer.headers.get("Content-Range", ""))
        if match is None or int(match[1]) != transfer.offset + len(transfer.data):
            raise StoreError(f"{where}: the server does not answer the range that was asked for")
    else:
        if transfer.offset:
            raise PermanentError(f"{where}: the server does not serve ranges")
        transfer.data.clear()
    etag = answer.headers.get("ETag", "")
    transfer.etag = etag if _strong_etag.fullmatch(etag) else None
    _check_length(answer, transfer, where)
    return True


def _check_length(answer: httpx.Response, transfer: _Transfer, where: str) -> None:
    length = answer.headers.get("Content-Length", "")
    if not re.fullmatch(r"[0-9]{1,18}", length):
        return  # chunked: counted as it arrives
    total = len(transfer.data) + int(length)
    wanted = total if transfer.size is None else min(total, transfer.size)
    if wanted > transfer.max_bytes:
        raise TooLargeError(f"{where}: {wanted} bytes where at most {transfer.max_bytes} are wanted")


_hint: Final = {
    401: ": it is not public",
    403: ", or not a public one: the server answered 403",
    429: ": it asks for fewer requests",
    503: ": it is unavailable or asks for fewer requests",
}
