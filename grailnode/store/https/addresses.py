"""HTTP connections to hosts that strangers name, restricted to public addresses.

The host name is resolved here, all its addresses are checked, and the connection is made to one of these addresses. So
the name is not resolved a second time, which could give another answer (DNS rebinding). TLS and the Host header use the
name (docs/adr/0211).
"""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, Final

import httpcore
import httpx
import trio

from grailnode.store.checks import PermanentError

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


class _PublicBackend(httpcore.TrioBackend):
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that accepts the connection."""
        failure: Exception | None = None
        with trio.move_on_after(timeout if timeout is not None else float("inf")):
            for address in await self._resolve(host, port):
                try:
                    return await super().connect_tcp(
                        address, port, local_address=local_address, socket_options=socket_options
                    )
                except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                    failure = error
            raise failure or httpcore.ConnectError("no address")
        raise httpcore.ConnectTimeout(f"no connection within {timeout:g} s") from failure

    @staticmethod
    async def _resolve(host: str, port: int) -> list[str]:
        try:
            infos = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host}: not resolved") from error
        addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
        private = next((address for address in addresses if not is_public(address)), None)
        if private is not None:
            raise PermanentError(
                f"{host}: resolves to {private}, which is not a public address; "
                "store.private_addresses = true allows it in a network of your own"
            )
        return addresses


class PublicTransport(httpx.AsyncHTTPTransport):
    """A transport for httpx that connects to public addresses only. HTTP/1.1, without proxies."""

    def __init__(self, connections: int) -> None:
        super().__init__(trust_env=False)
        # httpx has no option for how its connections are opened, so its pool is replaced
        if not hasattr(self, "_pool"):  # a later httpx would connect to any address
            raise RuntimeError(f"httpx {httpx.__version__} keeps its connections elsewhere: install an older one")
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=False),
            max_connections=connections,
            max_keepalive_connections=connections,
            network_backend=_PublicBackend(),
        )
