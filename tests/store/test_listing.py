"""Listing a public bucket over HTTPS: real pages, and responses of hostile servers."""

from collections.abc import AsyncIterator

import httpx
import pytest
import trio

from grailnode.store.https.https_store import HttpsStore, open_client
from grailnode.store.https.listing import ListingError, read_page
from grailnode.store.permanent_error import PermanentError
from grailnode.store.s3.s3_store import S3Store
from roles.ports import StoreError
from tests.support.servers.loopback import HttpRequest, Reply, serve

HEAD = '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'


def page(*keys: str, token: str = "", is_truncated: bool = False) -> bytes:
    contents = "".join(f"<Contents><Key>{key}</Key><Size>3</Size></Contents>" for key in keys)
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    flag = str(is_truncated or bool(token)).lower()
    return f"{HEAD}<IsTruncated>{flag}</IsTruncated>{contents}{more}</ListBucketResult>".encode()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(connect=2.0, silence=2.0) as client:
        yield client


async def list_paths(url: str, client: httpx.AsyncClient, prefix: str = "p/", after: str = "") -> list[str]:
    store = HttpsStore(url, client, plain_http=True)
    return [info.path async for info in store.list(prefix, after=after)]


async def test_a_real_bucket_is_listed_page_by_page(moto_bucket, client, monkeypatch: pytest.MonkeyPatch):
    """moto serves anonymous requests, here in pages of ten keys."""
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")
    location, credentials = moto_bucket
    store = S3Store(location, credentials)
    expected_paths = [f"p/{number:04d} &é" for number in range(25)]
    for path in [*expected_paths, "q/other"]:
        await store.put(path, b"abc")
    base = f"{location.endpoint}/{location.bucket}"
    assert await list_paths(base, client) == expected_paths
    assert await list_paths(base, client, after=expected_paths[12]) == expected_paths[13:]
    store.close()


async def test_pages_are_requested_by_token_and_foreign_keys_left_out(client, nursery: trio.Nursery):
    targets: list[str] = []

    def answer(request: HttpRequest) -> Reply:
        targets.append(request.target)
        first = len(targets) == 1
        return Reply(200, page("p/../a", "p/a", "p/b", "q", token="t/&amp;1") if first else page("r", "s"))

    url = await nursery.start(serve, answer)
    assert await list_paths(url, client) == ["p/a", "p/b"]
    assert targets[0] == "/?list-type=2&prefix=p%2F"
    assert targets[1].endswith("continuation-token=t%2F%261")


@pytest.mark.parametrize(
    ("reply", "kind", "match"),
    [
        (Reply(200, b"<html>"), PermanentError, "cannot be listed"),
        (Reply(200, b""), PermanentError, "cannot be listed"),
        (Reply(200, b"<Error/>"), PermanentError, "not a ListBucketResult"),
        (Reply(403, b"<Error/>"), PermanentError, "answered 403"),
        (Reply(301, b"", {"Location": "/x"}), PermanentError, "answered 301"),
        (Reply(503, b""), StoreError, "answered 503"),
        (Reply(200, page("p/b", "p/a")), StoreError, "out of order"),
        (Reply(200, page("p/a", "p/a")), StoreError, "out of order"),
        (Reply(200, page("p/a", token="again")), StoreError, "out of order"),
        (Reply(200, page(token="again")), StoreError, "announces more pages"),
        (Reply(200, page("p/a", is_truncated=True)), StoreError, "announces more pages"),
        (Reply(200, page() + b" " * (9 << 20)), StoreError, "a page of more than"),
    ],
)
async def test_invalid_listings(client, nursery: trio.Nursery, reply: Reply, kind, match: str):
    url = await nursery.start(serve, lambda _: reply)
    with pytest.raises(kind, match=match) as error_info:
        await list_paths(url, client)
    assert "\n" not in str(error_info.value)


@pytest.mark.parametrize("key", ["q/{:06d}", "p/../{:06d}"], ids=["of others", "of no object"])
async def test_an_endless_listing_of_foreign_keys_ends_in_an_error(client, nursery: trio.Nursery, key: str):
    targets: list[str] = []

    def answer(request: HttpRequest) -> Reply:
        targets.append(request.target)
        return Reply(200, page(key.format(len(targets)), token="more"))

    url = await nursery.start(serve, answer)
    with pytest.raises(StoreError, match="announces more pages"):
        await list_paths(url, client)
    assert len(targets) < 20


@pytest.mark.parametrize(
    "data",
    [
        b'<!DOCTYPE a [<!ENTITY b "' + b"c" * 99 + b'">]><ListBucketResult>&b;</ListBucketResult>',
        b'<!DOCTYPE a SYSTEM "http://127.0.0.1/">' + b"<ListBucketResult/>",
        b"<ListBucketResult>" + b"<a>" * 50,
        b"<ListBucketResult><Contents><Key>" + b"k" * 5000 + b"</Key></Contents></ListBucketResult>",
        b"<ListBucketResult><Contents><Size>-1</Size></Contents></ListBucketResult>",
        b"<ListBucketResult><Contents><Size>" + b"9" * 99 + b"</Size></Contents></ListBucketResult>",
        b"<ListBucketResult>&undefined;</ListBucketResult>",
        b"\xff\xfe<",
    ],
)
def test_hostile_documents(data: bytes):
    with pytest.raises(ListingError):
        read_page(data)
