"""Reads the objects of a public bucket or CDN over HTTPS.

Readers learn paths from signed indexes and from the protocol's naming. The root URL of a bucket can be listed when the
bucket permits public listing. A bucket that does not answers 403 for a missing object, so 403 means the same as 404
(docs/adr/0211). The XML in listings may be hostile.

Of a host that a stranger names, the name is resolved here, all its addresses must be public, and the connection is made
to one of them: a second resolution could give another answer (DNS rebinding). TLS and the Host header use the name.
"""

import re
from collections.abc import AsyncIterator, Iterable
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from itertools import zip_longest
from socket import SOCK_STREAM, getaddrinfo
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

import httpcore
import httpx
import trio

from grailnode.store.checks import PageCheck, PermanentError, begins_at, check_path, check_prefix, check_range, one_line
from protocol.limits import MIB
from roles.ports import NotFoundError, ObjectInfo, StoreError, TooLargeError

_IDLE_SECONDS: Final = 5.0  # for which a connection is kept for the next request
_MOST_ADDRESSES: Final = 8  # of a host that are tried
_NEXT_ADDRESS_SECONDS: Final = 0.25  # after which the next one is tried beside those before it (RFC 8305)
_MOST_LOOKUPS: Final = 512  # threads: a name whose servers are silent takes one for half a minute

_global_unicast: Final = IPv6Network("2000::/3")
_nat64: Final = IPv6Network("64:ff9b::/96")
_not_public_4: Final = (
    IPv4Network("168.63.129.16/32"),  # Azure's platform services: only virtual machines on Azure reach it
    IPv4Network("192.0.0.0/24"),  # IETF protocol assignments; older versions of ipaddress call most of it global
)


def is_public(address: str) -> bool:
    """Return whether everybody can reach an IP address: it is not loopback, private, link-local, shared, multicast,
    reserved, or one that a cloud provides inside its own network.
    """
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv4Address):
        return _is_public_4(ip)
    embedded = _embedded_ipv4(ip)
    if embedded:
        return all(_is_public_4(address) for address in embedded)
    return ip in _global_unicast and ip.is_global


def _is_public_4(ip: IPv4Address) -> bool:
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or any(ip in network for network in _not_public_4))


def _embedded_ipv4(ip: IPv6Address) -> tuple[IPv4Address, ...]:
    """Return the IPv4 addresses that an IPv6 address contains; most contain none."""
    if ip.ipv4_mapped is not None:
        return (ip.ipv4_mapped,)
    if ip.sixtofour is not None:
        return (ip.sixtofour,)
    if ip.teredo is not None:
        return ip.teredo
    if ip in _nat64:
        return (IPv4Address(int(ip) & 0xFFFF_FFFF),)
    return ()


class _Backend(httpcore.TrioBackend):
    """Opens connections to hosts whose names it looks up itself, only to public addresses where nothing else may be."""

    def __init__(self, public_only: bool) -> None:
        self._public_only = public_only
        self._lookups = trio.CapacityLimiter(_MOST_LOOKUPS)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that accepts the connection; one that is silent hardly delays the next ones."""
        streams: list[httpcore.AsyncNetworkStream] = []
        failure: Exception | None = None
        open_stream = partial(super().connect_tcp, local_address=local_address, socket_options=socket_options)

        async def connect(address: str, ended: trio.Event) -> None:
            nonlocal failure
            try:
                streams.append(await open_stream(address, port))
                attempts.cancel_scope.cancel()
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            ended.set()

        with trio.move_on_after(timeout if timeout is not None else float("inf")) as patience:
            addresses = await self._resolve(host, port)
            async with trio.open_nursery() as attempts:
                for address in addresses[:_MOST_ADDRESSES]:
                    ended = trio.Event()
                    attempts.start_soon(connect, address, ended)
                    with trio.move_on_after(_NEXT_ADDRESS_SECONDS):
                        await ended.wait()
        for other in streams[1:]:
            await other.aclose()
        if streams:
            return streams[0]
        if patience.cancelled_caught:
            raise httpcore.ConnectTimeout(f"no connection within {timeout:g} s") from failure
        raise failure or httpcore.ConnectError("no address")

    async def _resolve(self, host: str, port: int) -> list[str]:
        # Not by trio's own function: its threads also run what computes for long, which would wait for slow names.
        look_up = partial(getaddrinfo, host, port, type=SOCK_STREAM)
        try:
            infos = await trio.to_thread.run_sync(look_up, limiter=self._lookups, abandon_on_cancel=True)
        except (OSError, UnicodeError, RuntimeError) as error:  # a RuntimeError where no thread can be started
            raise httpcore.ConnectError(f"{host}: not resolved") from error
        addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
        private = next((address for address in addresses if not is_public(address)), None)
        if private is not None and self._public_only:
            raise PermanentError(
                f"{host}: resolves to {private}, which is not a public address; "
                "store.private_addresses = true allows it in a network of your own"
            )
        # IPv4 and IPv6 take turns (RFC 8305), so that many silent addresses of one of them hide none of the other.
        first_kind = [address for address in addresses if (":" in address) == (":" in addresses[0])]
        other_kind = [address for address in addresses if address not in first_kind]
        return [address for pair in zip_longest(first_kind, other_kind) for address in pair if address]


class _Transport(httpx.AsyncHTTPTransport):
    """A transport for httpx that opens connections as `_Backend` does. HTTP/1.1, without proxies."""

    def __init__(self, public_only: bool) -> None:
        super().__init__(trust_env=False)
        # httpx has no option for how its connections are opened, so its pool is replaced
        if not hasattr(self, "_pool"):  # a later httpx would connect to any address
            raise RuntimeError(f"httpx {httpx.__version__} keeps its connections elsewhere: install an older one")
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=False),
            max_connections=None,
            max_keepalive_connections=None,  # a number would count those in use, too, and close each idle one
            keepalive_expiry=_IDLE_SECONDS,
            network_backend=_Backend(public_only),
        )


MAX_PAGE_BYTES: Final = 4 * MIB
"""A listing page of 1,000 keys has at most some 3 MiB of XML."""

_MAX_MARKS: Final = 100_000  # '<' and '='; a page of 1,000 keys has some 25,000, and each may take 100 bytes of memory
_PAGE_SECONDS: Final = 60.0


class ListingError(Exception):
    """A document is not a page of a listing."""


def read_page(data: bytes) -> tuple[list[tuple[str, int]], bool, str]:
    """Return the keys and sizes of a page, whether more pages follow, and the token that requests the next one."""
    # In keys, '<' is written as an entity. A document in UTF-16, which expat reads by itself, has zeros.
    if b"<!DOCTYPE" in data or b"\0" in data:
        raise ListingError("the document has a document type declaration, or is not UTF-8")
    if data.count(b"<") + data.count(b"=") > _MAX_MARKS:
        raise ListingError("the document has too many elements")
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


def open_client(*, connect: float = 10.0, silence: float = 20.0, public_only: bool = False) -> httpx.AsyncClient:
    """Return an HTTP client for HttpsStore, without redirects, cookies and settings from the environment. Opening a
    connection may take `connect` seconds, and `silence` seconds may pass without a byte. For URLs that strangers name,
    it connects to public addresses only. It limits no connections, since some servers would keep all that there are:
    whoever reads limits the requests at a time, in all and of each key's space.
    """
    return httpx.AsyncClient(
        transport=_Transport(public_only),
        follow_redirects=False,
        trust_env=False,
        # cookies would let a server track its readers, and one that is not ASCII makes every later request fail
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        timeout=httpx.Timeout(silence, connect=connect, pool=None),
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
