"""Connections to hosts that strangers name: only to public addresses, whatever the name resolves to."""

import pytest
import trio

from grailnode.store.checks import PermanentError
from grailnode.store.https.addresses import is_public
from grailnode.store.https.https_store import HttpsStore, open_client
from roles.ports import StoreError
from tests.support.servers.loopback import serve
from tests.support.servers.served_files import FileServer


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8", "2002:808:808::", "64:ff9b::808:808"])
def test_public_addresses(address: str):
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.1.1", "172.16.3.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "192.0.0.8", "192.0.0.192"),
        *("::", "::1", "::127.0.0.1", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b:1::1"),
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        *("168.63.129.16", "::ffff:168.63.129.16", "2002:a83f:8110::", "64:ff9b::a83f:8110"),  # Azure's platform
    ],
)
def test_addresses_that_are_not_public(address: str):
    assert not is_public(address)


class Resolver(trio.abc.HostnameResolver):
    """A hostile resolver: it gives its answers in order, and repeats the last one."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.query_count = 0

    async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):  # noqa: A002
        self.query_count += 1
        address = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [(trio.socket.AF_INET, trio.socket.SOCK_STREAM, 6, "", (address, port or 0))]

    async def getnameinfo(self, sockaddr, flags):
        raise NotImplementedError


@pytest.mark.parametrize("host", ["bucket.example.org", "127.0.0.1", "localhost", "2130706433", "0x7f.1"])
async def test_a_host_with_a_private_address_is_refused_before_it_is_contacted(nursery: trio.Nursery, host: str):
    server = FileServer()
    server.objects["/o"] = b"secret"
    url = await nursery.start(serve, server.answer)
    port = url.rpartition(":")[2]
    trio.socket.set_custom_hostname_resolver(Resolver("127.0.0.1"))
    async with open_client(public_only=True) as client:
        store = HttpsStore(f"http://{host}:{port}", client, plain_http=True)
        with pytest.raises(PermanentError, match="not a public address"):
            await store.get("o", 100)
    assert server.requests == []


async def test_a_host_name_is_resolved_once():
    """The first answer is a public address without a server; a second resolution would give loopback."""
    resolver = Resolver("192.88.99.1", "127.0.0.1")
    trio.socket.set_custom_hostname_resolver(resolver)
    async with open_client(public_only=True, connect=0.2) as client:
        with pytest.raises(StoreError):
            await HttpsStore("http://rebind.example.org:9", client, plain_http=True).get("o", 1)
    assert resolver.query_count == 1


async def test_an_allowed_address_is_read_through_the_same_transport(nursery, monkeypatch: pytest.MonkeyPatch):
    server = FileServer()
    server.objects["/o"] = bytes(300_000)
    url = await nursery.start(serve, server.answer)
    monkeypatch.setattr("grailnode.store.https.addresses.is_public", lambda address: address == "127.0.0.1")
    async with open_client(public_only=True) as client:
        store = HttpsStore(url, client, plain_http=True)
        assert await store.get("o", 300_000) == bytes(300_000)
        assert await store.get("o", 300_000, offset=5, size=7) == bytes(7)
        with pytest.raises(StoreError):
            await HttpsStore("http://127.0.0.1:1", client, plain_http=True).get("o", 1)
