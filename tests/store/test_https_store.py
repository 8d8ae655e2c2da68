"""HttpsStore: servers that break off, falsify, are slow or redirect, hostile listings, and private addresses."""

import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
import trio

from grailnode.store.checks import PermanentError
from grailnode.store.https.https_store import HttpsStore, ListingError, is_public, open_client, read_page
from grailnode.store.s3.s3_store import S3Store
from protocol.limits import MIB
from roles.ports import NotFoundError, StoreError, TooLargeError
from tests.store.s3_buckets import listing_page
from tests.support.measuring.store_listing import paths
from tests.support.servers.loopback import UNSAID, FileServer, HttpRequest, Reply, serve

OBJECT = bytes(range(256)) * 4000
PATIENCE = 30.0  # of a machine with much other work


class Server(FileServer):
    """A correct file server, whose responses a test can change with `change`."""

    def __init__(self) -> None:
        super().__init__()
        self.objects["/o"] = OBJECT
        self.change: Callable[[HttpRequest, Reply], Reply] = lambda _, reply: reply

    def answer(self, request: HttpRequest) -> Reply:
        return self.change(request, super().answer(request))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def url(server: Server, nursery: trio.Nursery) -> str:
    base: str = await nursery.start(serve, server.answer)
    return base


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(connect=2.0, silence=2.0) as client:
        yield client


@pytest.fixture
def store(url: str, client: httpx.AsyncClient) -> HttpsStore:
    return HttpsStore(url, client, plain_http=True)


async def fails(action, match: str, kind: type[StoreError] = StoreError) -> None:
    with pytest.raises(kind, match=match) as error_info:
        await action
    assert "\n" not in str(error_info.value)
    assert str(error_info.value).startswith("http://127.0.0.1:")


async def test_a_transfer_that_breaks_off_is_an_error(store, server):
    server.change = lambda request, reply: replace(reply, cut=300_000)
    await fails(store.get("o", len(OBJECT)), "peer closed|disconnected|incomplete")
    assert len(server.requests) == 1


@pytest.mark.parametrize("length", [None, UNSAID, 5])
async def test_an_object_beyond_max_bytes_is_refused(store, server, length):
    server.objects["/o"] = bytes(32 * MIB)
    server.change = lambda request, reply: replace(reply, length=length)
    if length == 5:
        assert await store.get("o", 1000) == bytes(5)  # the bytes after Content-Length do not belong to the response
    else:
        await fails(store.get("o", 1000), "1000", TooLargeError)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_redirects_are_not_followed(store, server, url, status):
    server.change = lambda request, reply: Reply(status, b"", {"Location": f"{url}/o"})
    await fails(store.get("o", 10), "redirects", PermanentError)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "match", "kind"),
    [
        *((status, "no such object", NotFoundError) for status in (403, 404, 410)),
        *((429, "too many requests", StoreError), (503, "unavailable", StoreError)),
        *((status, str(status), StoreError) for status in (204, 500)),
    ],
)
async def test_other_statuses_are_errors(store, server, status, match, kind):
    server.change = lambda request, reply: Reply(status, b"<html>" if kind is NotFoundError else b"")
    await fails(store.get("o", 10), match, kind)


@pytest.mark.parametrize("content_range", ["", "bytes 1-4/10", "bytes x", "items 2-5/10", "bytes 2-5/10 or so"])
async def test_a_response_with_another_range_is_an_error(store, server, content_range):
    server.change = lambda request, reply: Reply(206, b"2345", {"Content-Range": content_range})
    await fails(store.get("o", 10, offset=2, size=4), "range")


async def test_a_server_without_ranges(store, server):
    server.change = lambda request, reply: Reply(200, OBJECT)
    assert await store.get("o", 4, size=4) == OBJECT[:4]
    assert await store.get("o", 0, size=0) == b""
    await fails(store.get("o", 4, offset=2, size=4), "ranges", PermanentError)


async def test_a_server_that_sends_more_than_the_range(store, server):
    server.change = lambda request, reply: Reply(206, OBJECT[2:], {"Content-Range": "bytes 2-9999/10000"})
    assert await store.get("o", 4, offset=2, size=4) == OBJECT[2:6]


async def test_compressed_answers_are_refused(store, server):
    server.change = lambda request, reply: replace(reply, headers={"Content-Encoding": "gzip"})
    await fails(store.get("o", len(OBJECT)), "compresses")
    assert server.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("cookie", ["a=b", "٣", "a=٣; Path=/"])
async def test_cookies_are_ignored(store, server, cookie):
    server.change = lambda request, reply: replace(reply, headers={"Set-Cookie": cookie})
    for _ in range(2):
        assert await store.get("o", len(OBJECT)) == OBJECT
    assert all("cookie" not in request.headers for request in server.requests)


async def test_a_transfer_below_the_minimum_rate_fails(url, client, server):
    store = HttpsStore(url, client, plain_http=True, grace=0.1, min_rate=1e6)
    server.change = lambda request, reply: replace(reply, piece=10, pause=0.02)
    await fails(store.get("o", len(OBJECT)), "slower than")


async def test_the_deadline_holds_for_everything(url, client, server):
    store = HttpsStore(url, client, plain_http=True, deadline=0.1, grace=60.0)
    server.change = lambda request, reply: replace(reply, piece=1000, pause=0.02)
    await fails(store.get("o", len(OBJECT)), "not finished in 0.1 s")


async def test_a_silent_server_is_an_error(url, server):
    async with open_client(connect=2.0, silence=0.1) as client:
        store = HttpsStore(url, client, plain_http=True)
        server.change = lambda request, reply: replace(reply, piece=1000, pause=60.0)
        await fails(store.get("o", len(OBJECT)), "ReadTimeout")


async def test_an_unreachable_server_is_reported_with_its_url(client):
    for base in ["http://127.0.0.1:1", "http://no-such-host.invalid"]:
        with pytest.raises(StoreError, match=base):
            await HttpsStore(base, client, plain_http=True).get("o", 1)


async def test_writes_are_refused(store, server):
    await fails(store.put("a", b""), "reading only", PermanentError)
    await fails(store.delete("a"), "reading only", PermanentError)
    assert server.requests == []


NOT_HTTPS = ["http://host/", "ftp://host/", "host/path"]
BAD_HOSTS = ["https://", "https://[h/", "https://h:65536/", "https://h:0/", "https://h:port/"]
MORE_THAN_A_PATH = ["https://user:secret@host/", "https://h/?q=1", "https://h/#f"]


@pytest.mark.parametrize("base", [*NOT_HTTPS, *BAD_HOSTS, *MORE_THAN_A_PATH])
async def test_base_urls_that_are_refused(client, base):
    with pytest.raises(ValueError, match="base URL"):
        HttpsStore(base, client)


async def test_the_environment_is_not_read(url, server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    async with open_client() as client:
        assert await HttpsStore(url, client, plain_http=True).get("o", MIB, size=3) == OBJECT[:3]


# Listing a public bucket over HTTPS: real pages, and responses of hostile servers


async def test_a_real_bucket_is_listed_page_by_page(moto_bucket, client, monkeypatch: pytest.MonkeyPatch):
    """moto serves anonymous requests, here in pages of ten keys."""
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")
    location, credentials = moto_bucket
    store = S3Store(location, credentials)
    expected_paths = [f"p/{number:04d} &é" for number in range(25)]
    for path in [*expected_paths, "q/other"]:
        await store.put(path, b"abc")
    public = HttpsStore(f"{location.endpoint}/{location.bucket}", client, plain_http=True)
    assert await paths(public, "p/") == expected_paths
    assert await paths(public, "p/", after=expected_paths[12]) == expected_paths[13:]
    store.close()


async def test_pages_are_requested_by_token_and_foreign_keys_left_out(store, server):
    pages = [listing_page("p/../a", "p/a", "p/b", "q", token="t/&amp;1"), listing_page("r", "s")]
    server.change = lambda request, reply: Reply(200, pages[len(server.requests) - 1])
    assert await paths(store, "p/") == ["p/a", "p/b"]
    first, second = (request.target for request in server.requests)
    assert first == "/?list-type=2&prefix=p%2F"
    assert second.endswith("continuation-token=t%2F%261")


@pytest.mark.parametrize(
    ("reply", "kind", "match"),
    [
        (Reply(200, b"<html>"), PermanentError, "cannot be listed"),
        (Reply(200, b""), PermanentError, "cannot be listed"),
        (Reply(200, b"<Error/>"), PermanentError, "not a ListBucketResult"),
        (Reply(403, b"<Error/>"), PermanentError, "answered 403"),
        (Reply(301, b"", {"Location": "/x"}), PermanentError, "answered 301"),
        (Reply(503, b""), StoreError, "answered 503"),
        (Reply(200, listing_page("p/b", "p/a")), StoreError, "out of order"),
        (Reply(200, listing_page("p/a", "p/a")), StoreError, "out of order"),
        (Reply(200, listing_page("p/a", token="again")), StoreError, "out of order"),
        (Reply(200, listing_page(token="again")), StoreError, "announces more pages"),
        (Reply(200, listing_page("p/a", is_truncated=True)), StoreError, "announces more pages"),
        (Reply(200, listing_page() + b" " * (9 << 20)), StoreError, "a page of more than"),
    ],
)
async def test_invalid_listings(store, server, reply: Reply, kind, match: str):
    server.change = lambda *_: reply
    await fails(paths(store, "p/"), match, kind)


@pytest.mark.parametrize("key", ["q/{:06d}", "p/../{:06d}"], ids=["of others", "of no object"])
async def test_an_endless_listing_of_foreign_keys_ends_in_an_error(store, server, key: str):
    server.change = lambda *_: Reply(200, listing_page(key.format(len(server.requests)), token="more"))
    await fails(paths(store, "p/"), "announces more pages")
    assert len(server.requests) < 20


UTF_16 = '\ufeff<!DOCTYPE a [<!ENTITY b "c">]><ListBucketResult>&b;</ListBucketResult>'


@pytest.mark.parametrize(
    "data",
    [
        b'<!DOCTYPE a [<!ENTITY b "' + b"c" * 99 + b'">]><ListBucketResult>&b;</ListBucketResult>',
        b'<!DOCTYPE a SYSTEM "http://127.0.0.1/">' + b"<ListBucketResult/>",
        *(text.encode(f"utf-16-{way}") for text in (UTF_16, UTF_16[1:]) for way in ("le", "be")),
        b"<ListBucketResult>" + b"<a>" * 50,
        b"<a><ListBucketResult/></a>",
        b"<ListBucketResult>" + b"<a/>" * 100_000 + b"</ListBucketResult>",
        b"<ListBucketResult " + b" ".join(b"a%d=''" % number for number in range(100_000)) + b"/>",
        b"<ListBucketResult><Contents><Size>-1</Size></Contents></ListBucketResult>",
        b"<ListBucketResult><Contents><Size>" + b"9" * 99 + b"</Size></Contents></ListBucketResult>",
        b"<ListBucketResult>&undefined;</ListBucketResult>",
        b"\xff\xfe<",
    ],
)
def test_hostile_documents(data: bytes):
    with pytest.raises(ListingError):
        read_page(data)


# Hosts that strangers name: only public addresses are contacted, whatever a name resolves to


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

    def look_up(self, host: str, port: int, type: int = 0) -> list[Any]:  # noqa: A002
        self.query_count += 1
        address = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [(trio.socket.AF_INET, trio.socket.SOCK_STREAM, 6, "", (address, port or 0))]

    async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):  # noqa: A002
        return self.look_up(host, port)

    async def getnameinfo(self, sockaddr, flags):
        raise NotImplementedError

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("grailnode.store.https.https_store.getaddrinfo", self.look_up)
        trio.socket.set_custom_hostname_resolver(self)


@pytest.mark.parametrize("host", ["bucket.example.org", "127.0.0.1", "localhost", "2130706433", "0x7f.1"])
async def test_a_host_with_a_private_address_is_refused_before_it_is_contacted(nursery, monkeypatch, host: str):
    server = FileServer()
    server.objects["/o"] = b"secret"
    url = await nursery.start(serve, server.answer)
    port = url.rpartition(":")[2]
    Resolver("127.0.0.1").install(monkeypatch)
    async with open_client(public_only=True) as client:
        store = HttpsStore(f"http://{host}:{port}", client, plain_http=True)
        with pytest.raises(PermanentError, match="not a public address"):
            await store.get("o", 100)
    assert server.requests == []


class EmptyResolver(Resolver):
    """A resolver that knows no host."""

    def look_up(self, host: str, port: int, type: int = 0) -> list[Any]:  # noqa: A002
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("public_only", [False, True])
async def test_a_host_that_does_not_exist_is_named_in_a_line_that_says_what_to_check(monkeypatch, public_only: bool):
    EmptyResolver().install(monkeypatch)
    async with open_client(public_only=public_only) as client:
        with pytest.raises(StoreError, match=r"^https://gone\.example/o: no host of this name is found; check the URL"):
            await HttpsStore("https://gone.example", client).get("o", 1)


async def test_a_host_name_is_resolved_once(monkeypatch: pytest.MonkeyPatch):
    """The first answer is a public address without a server; a second resolution would give loopback."""
    resolver = Resolver("192.88.99.1", "127.0.0.1")
    resolver.install(monkeypatch)
    async with open_client(public_only=True, connect=0.2) as client:
        with pytest.raises(StoreError):
            await HttpsStore("http://rebind.example.org:9", client, plain_http=True).get("o", 1)
    assert resolver.query_count == 1


@pytest.mark.parametrize(("public_only", "refusal"), [(True, "not a public address"), (False, "quick|silent")])
async def test_names_whose_servers_are_silent_keep_no_other_work_waiting(
    public_only: bool, refusal: str, monkeypatch: pytest.MonkeyPatch
):
    """As many names as commitments that a validator reads at a time, and the threads in which it computes."""
    answered = threading.Event()

    class SilentResolver(Resolver):
        def look_up(self, host: str | bytes, port: int, type: int = 0, *others: int) -> list[Any]:  # noqa: A002
            if "silent" in str(host):
                answered.wait(PATIENCE)
            return super().look_up(str(host), port)

    resolver = SilentResolver("127.0.0.1")
    for module in ("socket", "grailnode.store.https.https_store"):
        monkeypatch.setattr(f"{module}.getaddrinfo", resolver.look_up)
    async with open_client(public_only=public_only) as client, trio.open_nursery() as tasks:

        async def read(host: str) -> None:
            with pytest.raises(StoreError, match=refusal):
                await HttpsStore(f"https://{host}:1", client).get("o", 1)

        for number in range(256):
            tasks.start_soon(read, f"silent-{number}.example.org")
        await trio.testing.wait_all_tasks_blocked(0.1)
        with trio.fail_after(0.5 * PATIENCE):
            await read("quick.example.org")
            assert await trio.to_thread.run_sync(lambda: 1) == 1
        answered.set()


@pytest.mark.parametrize("public_only", [False, True])
@pytest.mark.parametrize("bad_addresses", [["127.0.0.2"], [f"2001:db8::{number}" for number in range(8)]])
async def test_a_host_whose_first_addresses_are_silent_is_read_at_another(
    nursery, monkeypatch, public_only: bool, bad_addresses: list[str]
):
    server = FileServer()
    server.objects["/o"] = b"here"
    port = int((await nursery.start(serve, server.answer)).rpartition(":")[2])
    backlog = socket.create_server(("127.0.0.2", port), backlog=0)  # which accepts nothing
    waiting = [socket.socket() for _ in range(4)]
    for other in waiting:
        other.setblocking(False)
        other.connect_ex(("127.0.0.2", port))

    def look_up(host: str | bytes, port: int, *others: int, **options: int) -> list[Any]:
        addresses = (*bad_addresses, "127.0.0.1") if "example" in str(host) else (host,)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    for module in ("socket", "grailnode.store.https.https_store"):
        monkeypatch.setattr(f"{module}.getaddrinfo", look_up)
    monkeypatch.setattr("grailnode.store.https.https_store.is_public", lambda address: True)
    async with open_client(public_only=public_only, connect=5.0) as client:
        assert await HttpsStore(f"http://bucket.example.org:{port}", client, plain_http=True).get("o", 4) == b"here"
    for other in (backlog, *waiting):
        other.close()


async def test_an_allowed_address_is_read_through_the_same_transport(nursery, monkeypatch: pytest.MonkeyPatch):
    server = FileServer()
    server.objects["/o"] = bytes(300_000)
    url = await nursery.start(serve, server.answer)
    monkeypatch.setattr("grailnode.store.https.https_store.is_public", lambda address: address == "127.0.0.1")
    async with open_client(public_only=True) as client:
        store = HttpsStore(url, client, plain_http=True)
        assert await store.get("o", 300_000) == bytes(300_000)
        assert await store.get("o", 300_000, offset=5, size=7) == bytes(7)
        with pytest.raises(StoreError):
            await HttpsStore("http://127.0.0.1:1", client, plain_http=True).get("o", 1)
