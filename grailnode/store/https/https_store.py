"""Reads the objects of a public bucket or CDN over HTTPS.

Readers learn paths from signed indexes and from the protocol's naming. The root URL of a bucket can be listed when the
bucket permits public listing. A bucket that does not answers 403 for a missing object, so 403 means the same as 404
(docs/adr/0211).
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final
from urllib.parse import quote, urlsplit

import httpx
import trio

from grailnode.store.checks import PermanentError, begins_at, check_path, check_prefix, check_range, one_line
from grailnode.store.https.addresses import PublicTransport
from grailnode.store.https.listing import list_bucket
from roles.ports import NotFoundError, ObjectInfo, StoreError, TooLargeError

_strong_etag: Final = re.compile(r'"[\x21\x23-\x7e]{1,128}"')


@dataclass(frozen=True)
class TransferLimits:
    """How slow a server may be, and how often a transfer is resumed.

    Attributes:
        grace: seconds at the beginning of a transfer in which `min_rate` does not apply.
        min_rate: bytes per second, on average since the beginning of the transfer.
        resumptions: how often a transfer that broke off is resumed, as long as each attempt receives new bytes.
    """

    deadline: float = 3600.0
    grace: float = 20.0
    min_rate: float = 16_384.0
    resumptions: int = 8


def open_client(
    *, connect: float = 10.0, silence: float = 20.0, connections: int = 32, public_only: bool = False
) -> httpx.AsyncClient:
    """Return an HTTP client for HttpsStore, without redirects, cookies and settings from the environment.

    Args:
        connect: seconds for opening a connection.
        silence: seconds that may pass without a byte.
        public_only: connect to public addresses only, for URLs that strangers name.
    """
    return httpx.AsyncClient(
        transport=PublicTransport(connections) if public_only else None,
        follow_redirects=False,
        trust_env=False,
        # cookies would let a server track its readers, and one that is not ASCII makes every later request fail
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        timeout=httpx.Timeout(silence, connect=connect, pool=None),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        headers={"User-Agent": "grailnode", "Accept-Encoding": "identity"},
    )


@dataclass
class _Transfer:
    """The transfer of an object or of a range, with a strong ETag of the object when the server sent one."""

    path: str
    max_bytes: int
    offset: int
    size: int | None
    etag: str | None = None
    data: bytearray = field(default_factory=bytearray)

    def headers(self) -> dict[str, str]:
        """Return headers that request the remaining bytes.

        Without an ETag they could belong to another object, so the transfer starts again.
        """
        if self.data and self.etag is None:
            self.data.clear()
        start = self.offset + len(self.data)
        last = "" if self.size is None else str(self.offset + max(self.size, 1) - 1)
        headers = {} if start == 0 and not last else {"Range": f"bytes={start}-{last}"}
        if self.data and self.etag is not None:
            headers["If-Range"] = self.etag
        return headers


class _BrokenOffError(StoreError):
    """The connection ended before the body did."""


class HttpsStore:
    """Implements ObjectStore for the objects below a URL; writes are refused.

    Args:
        base_url: paths are appended to it, such as 'https://bucket.example.org/run/'.
        client: from `open_client`; the caller closes it.
        plain_http: allow 'http:', for relays and buckets on this machine or in a trusted network.

    Raises:
        ValueError: `base_url` is not such a URL, or has credentials, a query or a fragment.
    """

    def __init__(
        self,
        base_url: str,
        client: httpx.AsyncClient,
        *,
        limits: TransferLimits | None = None,
        plain_http: bool = False,
    ) -> None:
        schemes = {"https", "http"} if plain_http else {"https"}
        if not _is_base_url(base_url, schemes):
            raise ValueError(f"not a base URL ({' or '.join(sorted(schemes))}, a host, a path): {base_url!r}")
        self._base = base_url.rstrip("/") + "/"
        self._client = client
        self._limits = limits or TransferLimits()

    async def put(self, path: str, data: bytes) -> None:
        """Always raises PermanentError: HTTPS is for reading only."""
        raise PermanentError(f"{self._base}{check_path(path)}: not stored, HTTPS is for reading only")

    async def delete(self, path: str) -> None:
        """Always raises PermanentError: HTTPS is for reading only."""
        raise PermanentError(f"{self._base}{check_path(path)}: not deleted, HTTPS is for reading only")

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list when the base URL is the root of a bucket with public listing."""
        return list_bucket(self._client, self._base, check_prefix(prefix), after)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get; resumes a transfer that breaks off, unless the object has changed."""
        check_path(path)
        check_range(max_bytes, offset, size)
        transfer = _Transfer(path, max_bytes, offset, size)
        try:
            with trio.fail_after(self._limits.deadline):
                await self._resume_until_done(transfer)
        except trio.TooSlowError as error:
            raise StoreError(f"{self._base}{path}: not finished in {self._limits.deadline:g} s") from error
        return bytes(transfer.data if size is None else transfer.data[:size])

    async def _resume_until_done(self, transfer: _Transfer) -> None:
        most_bytes = 0
        for resumption in range(self._limits.resumptions + 1):
            try:
                await self._receive(transfer)
            except _BrokenOffError:
                if len(transfer.data) <= most_bytes or resumption == self._limits.resumptions:
                    raise
                most_bytes = len(transfer.data)
            else:
                return

    async def _receive(self, transfer: _Transfer) -> None:
        where = self._base + transfer.path
        has_body = False
        try:
            url = self._base + quote(transfer.path, safe="/")
            async with self._client.stream("GET", url, headers=transfer.headers()) as response:
                if _accept(response, transfer, where):
                    has_body = True
                    await self._read(response, transfer, where)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            kind = _BrokenOffError if has_body else StoreError
            raise kind(f"{where}: {one_line(error)}") from error

    async def _read(self, response: httpx.Response, transfer: _Transfer, where: str) -> None:
        start, received_bytes = trio.current_time(), 0
        target_bytes = None if transfer.size is None else max(transfer.size, 1)
        async for piece in response.aiter_raw():
            received_bytes += len(piece)
            transfer.data += piece
            if target_bytes is not None and len(transfer.data) >= target_bytes:
                del transfer.data[target_bytes:]  # the server ignores the end of the range
                break
            if len(transfer.data) > transfer.max_bytes:
                raise TooLargeError(f"{where}: more than {transfer.max_bytes} bytes")
            if trio.current_time() - start > self._limits.grace + received_bytes / self._limits.min_rate:
                raise StoreError(f"{where}: slower than {self._limits.min_rate:g} bytes per second")
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


def _accept(response: httpx.Response, transfer: _Transfer, where: str) -> bool:
    """Check the head of a response, and return whether a body follows that continues the transfer.

    When the object has changed, the transfer starts again.
    """
    status = response.status_code
    if status in {403, 404, 410}:
        raise NotFoundError(f"{where}: no such object{_hint.get(status, '')}")
    if status == 416 and not transfer.data:
        return False  # the range begins after the end of the object, so it is empty
    if 300 <= status < 400:
        raise PermanentError(f"{where}: redirects are not followed ({status}): give the final URL")
    if status not in {200, 206}:
        raise StoreError(f"{where}: the server answered {status}{_hint.get(status, '')}")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise StoreError(f"{where}: the server compresses the object, which the request excluded")
    if status == 206 or "Content-Range" in response.headers:  # some servers answer ranges with status 200
        if not begins_at(response.headers.get("Content-Range", ""), transfer.offset + len(transfer.data)):
            raise StoreError(f"{where}: the server did not send the requested range")
    else:
        if transfer.offset:
            raise PermanentError(f"{where}: the server does not support ranges")
        transfer.data.clear()
    etag = response.headers.get("ETag", "")
    transfer.etag = etag if _strong_etag.fullmatch(etag) else None
    _check_length(response, transfer, where)
    return True


def _check_length(response: httpx.Response, transfer: _Transfer, where: str) -> None:
    length = response.headers.get("Content-Length", "")
    if not re.fullmatch(r"[0-9]{1,18}", length):
        return  # chunked: the body is counted while it arrives
    total = len(transfer.data) + int(length)
    size = total if transfer.size is None else min(total, transfer.size)
    if size > transfer.max_bytes:
        raise TooLargeError(f"{where}: {size} bytes where at most {transfer.max_bytes} are allowed")


_hint: Final = {
    401: ": the object is not public",
    403: ", or the object is not public: the server answered 403",
    429: ": too many requests",
    503: ": the server is unavailable, or there are too many requests",
}
