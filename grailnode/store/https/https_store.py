"""Reads the objects of a public bucket or CDN over HTTPS.

Readers learn paths from signed indexes and from the protocol's naming. The root URL of a bucket can be listed when the
bucket permits public listing. A bucket that does not answers 403 for a missing object, so 403 means the same as 404
(docs/adr/0211). The XML in listings may be hostile.
"""

import re
from collections.abc import AsyncIterator
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

import httpx
import trio

from grailnode.store.checks import PageCheck, PermanentError, begins_at, check_path, check_prefix, check_range, one_line
from grailnode.store.https.addresses import PublicTransport
from protocol.limits import MIB
from roles.ports import NotFoundError, ObjectInfo, StoreError, TooLargeError

MAX_PAGE_BYTES: Final = 4 * MIB
"""A listing page of 1,000 keys has at most some 3 MiB of XML."""

_PAGE_SECONDS: Final = 60.0


class ListingError(Exception):
    """A document is not a page of a listing."""


def read_page(data: bytes) -> tuple[list[tuple[str, int]], bool, str]:
    """Return the keys and sizes of a page, whether more pages follow, and the token that requests the next one."""
    if b"<!DOCTYPE" in data:  # in keys, '<' is written as an entity
        raise ListingError("the document has a document type declaration")
    try:
        root = ElementTree.fromstring(data, ElementTree.XMLParser(encoding="UTF-8"))  # noqa: S314 -- no entities
    except (ElementTree.ParseError, ValueError) as error:
        raise ListingError(str(error)) from error
    if root.tag.rpartition("}")[2] != "ListBucketResult":
        raise ListingError("the document is not a ListBucketResult")
    objects = []
    for entry in root.iterfind("{*}Contents"):
        size = entry.findtext("{*}Size", "0")
        if not (size.isascii() and size.isdecimal() and len(size) < 19):
            raise ListingError("a size is not a number")
        objects.append((entry.findtext("{*}Key", ""), int(size)))
    return objects, root.findtext("{*}IsTruncated") == "true", root.findtext("{*}NextContinuationToken", "")


async def list_bucket(client: httpx.AsyncClient, base: str, prefix: str, after: str) -> AsyncIterator[ObjectInfo]:
    """Yield the objects below a prefix whose paths sort after `after`, page by page, from a bucket's root URL with '/'
    at its end; StoreError if there is no response, or the listing is out of order or does not end.
    """
    where = base + prefix
    query = {"list-type": "2", "prefix": prefix} | ({"start-after": after} if after else {})
    check = PageCheck(where, prefix, after)
    while True:
        try:
            objects, is_truncated, token = read_page(
                await _fetch(client, f"{base}?{urlencode(query, quote_via=quote)}", where)
            )
        except ListingError as error:
            raise PermanentError(f"{where}: cannot be listed ({error})") from error
        for info in check.objects(objects):
            yield info
        if not is_truncated:
            return
        check.check_progress()
        if not token:
            raise StoreError(f"{where}: the listing announces more pages, but does not say how to request them")
        query = {"list-type": "2", "prefix": prefix, "continuation-token": token}


async def _fetch(client: httpx.AsyncClient, url: str, where: str) -> bytes:
    data = bytearray()
    try:
        with trio.fail_after(_PAGE_SECONDS):
            async with client.stream("GET", url) as response:
                status = response.status_code
                if status == 429 or status >= 500:
                    raise StoreError(f"{where}: the server answered {status}")
                if status != 200:
                    raise PermanentError(f"{where}: cannot be listed (the server answered {status})")
                async for piece in response.aiter_raw():
                    data += piece
                    if len(data) > MAX_PAGE_BYTES:
                        raise StoreError(f"{where}: a page of more than {MAX_PAGE_BYTES} bytes")
        return bytes(data)
    except trio.TooSlowError as error:
        raise StoreError(f"{where}: no page of the listing within {_PAGE_SECONDS:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise StoreError(f"{where}: {one_line(error)}") from error


def open_client(
    *, connect: float = 10.0, silence: float = 20.0, connections: int = 32, public_only: bool = False
) -> httpx.AsyncClient:
    """Return an HTTP client for HttpsStore, without redirects, cookies and settings from the environment. Opening a
    connection may take `connect` seconds, and `silence` seconds may pass without a byte. For URLs that strangers name,
    it connects to public addresses only.
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


class HttpsStore:
    """Implements ObjectStore for the objects below a URL; writes are refused.

    Args:
        base_url: paths are appended to it, such as 'https://bucket.example.org/run/'.
        client: from `open_client`; the caller closes it.
        deadline: seconds of a transfer.
        min_rate: bytes per second, on average since the beginning of a transfer.
        grace: seconds at that beginning in which `min_rate` does not apply.
        plain_http: allow 'http:', for relays and buckets on this machine or in a trusted network.

    Raises:
        ValueError: `base_url` is not such a URL, or has credentials, a query or a fragment.
    """

    def __init__(
        self,
        base_url: str,
        client: httpx.AsyncClient,
        *,
        deadline: float = 3600.0,
        min_rate: float = 16_384.0,
        grace: float = 20.0,
        plain_http: bool = False,
    ) -> None:
        schemes = {"https", "http"} if plain_http else {"https"}
        if not _is_base_url(base_url, schemes):
            raise ValueError(f"not a base URL ({' or '.join(sorted(schemes))}, a host, a path): {base_url!r}")
        self._base = base_url.rstrip("/") + "/"
        self._client = client
        self._deadline, self._min_rate, self._grace = deadline, min_rate, grace

    async def put(self, path: str, data: bytes) -> None:
        raise PermanentError(f"{self._base}{check_path(path)}: not stored, HTTPS is for reading only")

    async def delete(self, path: str) -> None:
        raise PermanentError(f"{self._base}{check_path(path)}: not deleted, HTTPS is for reading only")

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list when the base URL is the root of a bucket with public listing."""
        return list_bucket(self._client, self._base, check_prefix(prefix), after)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get; of an empty range one byte is requested, to learn whether the object exists."""
        check_path(path)
        check_range(max_bytes, offset, size)
        where = self._base + path
        last = "" if size is None else str(offset + max(size, 1) - 1)
        headers = {"Range": f"bytes={offset}-{last}"} if offset or last else {}
        try:
            with trio.fail_after(self._deadline):
                url = self._base + quote(path, safe="/")
                async with self._client.stream("GET", url, headers=headers) as response:
                    if not _accept(response, where, offset):
                        return b""
                    _check_length(response, where, max_bytes, size)
                    return await self._read(response, where, max_bytes, size)
        except trio.TooSlowError as error:
            raise StoreError(f"{where}: not finished in {self._deadline:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise StoreError(f"{where}: {one_line(error)}") from error

    async def _read(self, response: httpx.Response, where: str, max_bytes: int, size: int | None) -> bytes:
        start, data = trio.current_time(), bytearray()
        async for piece in response.aiter_raw():
            data += piece
            if size is not None and len(data) >= size:
                del data[size:]  # the server ignores the end of the range
                break
            if len(data) > max_bytes:
                break
            if trio.current_time() - start > self._grace + len(data) / self._min_rate:
                raise StoreError(f"{where}: slower than {self._min_rate:g} bytes per second")
        if len(data) > max_bytes:
            raise TooLargeError(f"{where}: more than {max_bytes} bytes")
        return bytes(data)


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


def _accept(response: httpx.Response, where: str, offset: int) -> bool:
    """Check the head of a response, and return whether a body follows."""
    status = response.status_code
    if status in {403, 404, 410}:
        raise NotFoundError(f"{where}: no such object{_hint.get(status, '')}")
    if status == 416:
        return False  # the range begins after the end of the object, so it is empty
    if 300 <= status < 400:
        raise PermanentError(f"{where}: redirects are not followed ({status}): give the final URL")
    if status not in {200, 206}:
        raise StoreError(f"{where}: the server answered {status}{_hint.get(status, '')}")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise StoreError(f"{where}: the server compresses the object, which the request excluded")
    if status == 206 or "Content-Range" in response.headers:  # some servers answer ranges with status 200
        if not begins_at(response.headers.get("Content-Range", ""), offset):
            raise StoreError(f"{where}: the server did not send the requested range")
    elif offset:
        raise PermanentError(f"{where}: the server does not support ranges")
    return True


def _check_length(response: httpx.Response, where: str, max_bytes: int, size: int | None) -> None:
    length = response.headers.get("Content-Length", "")
    if not re.fullmatch(r"[0-9]{1,18}", length):
        return  # chunked: the body is counted while it arrives
    total = int(length) if size is None else min(int(length), size)
    if total > max_bytes:
        raise TooLargeError(f"{where}: {total} bytes where at most {max_bytes} are allowed")


_hint: Final = {
    401: ": the object is not public",
    403: ", or the object is not public: the server answered 403",
    429: ": too many requests",
    503: ": the server is unavailable, or there are too many requests",
}
