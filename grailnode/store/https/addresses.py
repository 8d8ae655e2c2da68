"""HTTP to hosts that strangers name: only to public addresses, checked at the very address that is connected to.

The name is resolved here, every address it has is looked at, and the connection goes to a literal address; a second
resolution that answers otherwise (DNS rebinding) never happens. TLS and the Host header keep the name (docs/adr/0211).
"""

from collections.abc import AsyncIterator, Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, Final

import httpcore
import httpx
import trio

from grailnode.store.permanent_error import PermanentError

_global_unicast: Final = IPv6Network("2000::/3")
_nat64: Final = IPv6Network("64:ff9b::/96")
_not_public_4: Final = (
    IPv4Network("168.63.129.16/32"),  # Azure's platform services: only virtual machines on Azure reach it
    IPv4Network(
        "192.0.0.0/24"
    ),  # IETF protocol assignments (RFC 6890); older versions of ipaddress call most of it global
)


def is_public(address: str) -> bool:
    """Whether an IP address is one that everybody reaches: no loopback, private, link-local, shared, multicast or
    reserved one.

    Raises:
        ValueError: not an IP address.
    """
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv4Address):
        return _is_public_4(ip)
    inner = _inside(ip)
    if inner:
        return all(_is_public_4(address) for address in inner)
    return ip in _global_unicast and ip.is_global


def _is_public_4(ip: IPv4Address) -> bool:
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or any(ip in network for network in _not_public_4))


def _inside(ip: IPv6Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that an IPv6 address stands for; none for most."""
    if ip.ipv4_mapped is not None:
        return (ip.ipv4_mapped,)
    if ip.sixtofour is not None:
        return (ip.sixtofour,)
    if ip.teredo is not None:
        return ip.teredo
    if ip in _nat64:
        return (IPv4Address(int(ip) & 0xFFFF_FFFF),)
    return ()


class _PublicBackend(httpcore.AsyncNetworkBackend):
    """Opens TCP connections, to public addresses alone."""

    def __init__(self) -> None:
        self._inner = httpcore.TrioBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers.

        Raises:
            RefusedError: the host has an address that is not public.
            httpcore.ConnectError, httpcore.ConnectTimeout: nobody there.
        """
        failure: Exception | None = None
        with trio.move_on_after(timeout if timeout is not None else float("inf")):
            for address in await self._resolve(host, port):
                try:
                    return await self._inner.connect_tcp(
                        address, port, local_address=local_address, socket_options=socket_options
                    )
                except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                    failure = error
            raise failure or httpcore.ConnectError("no address")
        raise httpcore.ConnectTimeout(f"no connection within {timeout:g} s") from failure

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Raises RefusedError: not for strangers' hosts."""
        raise PermanentError(f"{path}: a socket of this machine")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await trio.sleep(seconds)

    @staticmethod
    async def _resolve(host: str, port: int) -> list[str]:
        try:
            found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host}: not resolved ({error})") from error
        addresses = list(dict.fromkeys(str(item[4][0]) for item in found))
        private = next((address for address in addresses if not is_public(address)), None)
        if private is not None:
            raise PermanentError(
                f"{host}: resolves to {private}, which is not a public address; "
                "store.private_addresses = true allows it in a network of your own"
            )
        return addresses


class _Body(httpx.AsyncByteStream):
    """A body of httpcore's as httpx reads it."""

    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._response.aiter_stream():
                yield piece
        except _FAILURES as error:
            raise httpx.TransportError(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        await self._response.aclose()


_FAILURES: Final = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
)


class PublicTransport(httpx.AsyncBaseTransport):
    """httpx over connections to public addresses; HTTP/1.1, no proxies."""

    def __init__(self, connections: int) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=False),
            max_connections=connections,
            max_keepalive_connections=connections,
            network_backend=_PublicBackend(),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request.

        Raises:
            RefusedError: the host has an address that is not public.
            httpx.TransportError: no answer.
        """
        asked = httpcore.Request(
            request.method,
            httpcore.URL(
                scheme=request.url.raw_scheme,
                host=request.url.raw_host,
                port=request.url.port,
                target=request.url.raw_path,
            ),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        try:
            answer = await self._pool.handle_async_request(asked)
        except _FAILURES as error:
            raise httpx.TransportError(f"{type(error).__name__}: {error}") from error
        return httpx.Response(answer.status, headers=answer.headers, stream=_Body(answer), extensions=answer.extensions)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()
