"""S3Store with a service that fails, lies or is slow: a StoreError of one line, in bounded time and memory."""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
import trio
import trio.testing

from grailnode.store.checks import MAX_EMPTY_PAGES
from grailnode.store.place import PlaceSection
from grailnode.store.s3 import s3_session
from grailnode.store.s3.s3_session import S3Credentials
from grailnode.store.s3.s3_store import PART_BYTES, S3Store
from protocol.limits import MIB
from roles.ports import StoreError, TooLargeError
from tests.store.s3_buckets import Bucket, listing_page
from tests.support.faults.http_scenarios import HTTP_FAULTS, HttpOutcome, run_http_scenario
from tests.support.measuring.store_listing import paths
from tests.support.servers.loopback import UNSAID, HttpRequest, Reply, serve

CREDENTIALS = S3Credentials("some-access-key", "some-secret-key", "some-token")

OpenStore = Callable[..., S3Store]


class Service:
    """Answers every request with `reply`, or with the result of `answer`.

    Attributes:
        requests: all requests so far.
    """

    def __init__(self) -> None:
        self.reply = Reply()
        self.answer: Callable[[HttpRequest], Reply] | None = None
        self.requests: list[HttpRequest] = []

    def __call__(self, request: HttpRequest) -> Reply:
        self.requests.append(request)
        return self.answer(request) if self.answer else self.reply


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def location(service: Service, nursery: trio.Nursery) -> PlaceSection:
    url = await nursery.start(serve, service)
    return PlaceSection(kind="s3", bucket="bucket", endpoint=url, addressing="path", silence_seconds=5.0)


@pytest.fixture
def open_store(location: PlaceSection) -> Iterator[OpenStore]:
    """Open stores at the service, or at a changed location of it, and close them at the end of the test."""
    with ExitStack() as stores:

        def open_store(
            credentials: S3Credentials | None = CREDENTIALS, part_bytes: int = PART_BYTES, **changes: Any
        ) -> S3Store:
            place = location.model_copy(update=changes)
            return stores.enter_context(closing(S3Store(place, credentials, part_bytes)))

        yield open_store


@pytest.fixture
async def store(open_store: OpenStore) -> S3Store:
    return open_store()


def xml(body: bytes, status: int = 200) -> Reply:
    return Reply(status, body, {"Content-Type": "application/xml"})


def result(body: str) -> Reply:
    return xml(f"<?xml version='1.0'?><R>{body}</R>".encode())


def refusal(status: int, code: str) -> Reply:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>a long story\nin lines</Message></Error>"
    return xml(body.encode(), status)


def listing(*keys: str, token: str = "") -> Reply:
    return xml(listing_page(*keys, token=token))


async def fails(action, match: str, kind: type[StoreError] = StoreError) -> None:
    with pytest.raises(kind, match=match) as error_info:
        await action
    assert "\n" not in str(error_info.value)
    assert "some-secret-key" not in str(error_info.value)
    assert str(error_info.value).startswith("s3://bucket/")


@pytest.mark.parametrize(
    ("status", "code", "match"),
    [
        (500, "InternalError", "refused or failed"),
        (503, "SlowDown", "too many requests"),
        (503, "", "unavailable"),
        (429, "TooManyRequests", "too many requests"),
        (403, "AccessDenied", "policy"),
        (403, "InvalidAccessKeyId", "access key"),
        (403, "SignatureDoesNotMatch", "secret key"),
        (403, "RequestTimeTooSkewed", "clock"),
        (409, "OperationAborted", "refused or failed"),
        (412, "PreconditionFailed", "refused or failed"),
        (301, "PermanentRedirect", "region and endpoint"),
        (307, "TemporaryRedirect", "region and endpoint"),
        (400, "AuthorizationHeaderMalformed", "another region"),
        (404, "NoSuchBucket", "no such bucket"),
        (418, "x" * 5000, "refused or failed"),
    ],
)
async def test_errors_of_the_service_are_reported_in_one_line(store, service, status, code, match):
    service.reply = refusal(status, code)
    await fails(store.put("a", b"x"), match)
    await fails(store.get("a", 1), match)
    await fails(store.delete("a"), match)
    await fails(paths(store, "a"), match)
    assert all(len(request.target) < 200 for request in service.requests)


HEADERS = (
    *("Content-Length", "Content-Range", "Content-Encoding", "Content-Type", "Last-Modified", "ETag", "Expires"),
    *("x-amz-mp-parts-count", "x-amz-missing-meta", "x-amz-object-lock-retain-until-date", "x-amz-delete-marker"),
)
TAGS = (
    *("Contents", "Key", "Size", "LastModified", "IsTruncated"),
    *("MaxKeys", "NextContinuationToken", "Upload", "Initiated"),
)
DATES = ("Wed, 99 Foo 99999 99:99:99 GMT", "2020-13-45T99:99:99Z")
VALUES = ("", "abc", "-1", "9" * 30, "1e5", "\x01", "é", *DATES, "gzip", "nan")


@pytest.mark.parametrize("seed", range(6))
async def test_random_answers_never_leak_another_exception(store, service, seed):
    rng = random.Random(seed)

    def element(depth: int) -> str:
        tags = rng.choices(TAGS, k=rng.randrange(4))
        return "".join(f"<{tag}>{element(depth - 1)}</{tag}>" for tag in tags) if depth else rng.choice(VALUES)

    for _ in range(40):
        headers = {rng.choice(HEADERS): rng.choice(VALUES) for _ in range(rng.randrange(3))}
        status, body = rng.choice((200, 200, 206, 404, 400)), f"<R>{element(rng.randrange(4))}</R>"
        service.reply = Reply(status, body.encode(), headers)
        with suppress(StoreError):
            await store.get("a", 100, offset=rng.choice((0, 2)))
        with suppress(StoreError):
            await paths(store, "a")


async def test_botocore_does_not_retry(store, service):
    service.reply = refusal(500, "InternalError")
    await fails(store.put("a", b"x"), "refused")
    await fails(store.get("a", 1), "refused")
    assert [request.method for request in service.requests] == ["PUT", "GET"]


@pytest.mark.parametrize("claims_its_length", [True, False])
async def test_an_object_beyond_the_ceiling_is_not_read(store, service, claims_its_length):
    service.reply = Reply(200, bytes(8 * MIB), length=None if claims_its_length else UNSAID)
    await fails(store.get("a", 1000), "1000", TooLargeError)


async def test_an_interrupted_response_is_an_error(store, service):
    service.reply = Reply(200, b"x" * 1000, cut=400)
    await fails(store.get("a", 1000), "s3://bucket/a: .")


@pytest.mark.parametrize(("piece", "pause"), [(1, 0.02), (500, 60.0)], ids=["crawls", "stops"])
async def test_a_slow_or_silent_response_ends_at_its_deadline(open_store, service, piece, pause):
    store = open_store(silence_seconds=0.3, deadline_seconds=0.5, min_bytes_per_second=1e6)
    service.reply = Reply(200, b"x" * 1000, piece=piece, pause=pause)
    start = trio.current_time()
    await fails(store.get("a", 1000), "slower than|[Rr]ead timed? ?out|no answer within")
    assert trio.current_time() - start < 5


async def test_a_response_with_another_range_is_an_error(store, service):
    for reply in [
        Reply(200, b"0123456789"),
        Reply(206, b"0123", {"Content-Range": "bytes 0-3/10"}),
        Reply(206, b"0123", {"Content-Range": "a story"}),
        Reply(206, b"0123"),
    ]:
        service.reply = reply
        await fails(store.get("a", 10, offset=2, size=4), "range")
    service.reply = Reply(206, b"2345", {"Content-Range": "bytes 2-5/10"})
    assert await store.get("a", 10, offset=2, size=4) == b"2345"


@pytest.mark.parametrize("status", [200, 500])
async def test_a_response_that_is_not_an_object_has_a_maximum_size(store, service, monkeypatch, status):
    monkeypatch.setattr(s3_session, "MAX_RESPONSE_BYTES", 100_000)
    service.reply = xml(b"<ListBucketResult>" + b" " * (4 * MIB), status)
    await fails(paths(store, "a"), "more than 100000 bytes")


@pytest.mark.parametrize(
    ("keys", "match", "most_requests"),
    [
        (["a/1", "a/2"], "out of order", 2),
        ([], "announces more pages", MAX_EMPTY_PAGES + 2),
        (["b/{:06d}"], "announces more pages", MAX_EMPTY_PAGES + 2),
    ],
    ids=["the same keys", "empty pages", "foreign keys"],
)
async def test_a_circular_listing_ends_in_an_error(store, service, keys, match, most_requests):
    service.answer = lambda _: listing(*(key.format(len(service.requests)) for key in keys), token="again")
    await fails(paths(store, "a/"), match)
    assert 2 <= len(service.requests) <= most_requests


async def test_a_listing_leaves_out_invalid_and_foreign_keys(store, service):
    service.reply = listing("0", "a/", "a/.hidden", "a//b", "a/1", "a/2/../3", "a/4", "b")
    assert await paths(store, "a/") == ["a/1", "a/4"]
    service.reply = listing("a/1", "a/2", "a/3")  # the service ignores where to begin
    assert await paths(store, "a/", "a/1") == ["a/2", "a/3"]
    service.reply = listing("a/2", "a/1")
    with pytest.raises(StoreError, match="out of order"):
        await paths(store, "a/")


@pytest.mark.parametrize(("headers_of_parts", "match"), [({}, "no ETag"), ({"ETag": '"1"'}, "InternalError")])
async def test_an_upload_that_fails_with_status_200_is_an_error(open_store, service, headers_of_parts, match):
    """A part has no ETag, or the completion fails."""

    def answer(request: HttpRequest) -> Reply:
        if request.method == "PUT":
            return Reply(200, b"", headers_of_parts)
        if request.method == "POST" and "uploadId" in request.target:
            return refusal(200, "InternalError")
        return result("<UploadId>1</UploadId>" if request.method == "POST" else "")

    service.answer = answer
    await fails(open_store(part_bytes=5 * MIB).put("a", bytes(6 * MIB)), match)


async def test_an_unreachable_server_is_reported_with_its_url(open_store):
    for endpoint in ["http://127.0.0.1:1", "http://no-such-host.invalid"]:
        store = open_store(endpoint=endpoint, connect_seconds=0.5, deadline_seconds=5.0)
        await fails(store.get("a", 1), re.escape(endpoint))


async def test_a_request_uses_the_given_keys_and_no_environment(service, open_store, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-environment")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    for credentials in (CREDENTIALS, None):
        await open_store(credentials).put("a", b"x")
    signed_headers, unsigned_headers = (request.headers for request in service.requests)
    assert "some-access-key" in signed_headers["authorization"]
    assert signed_headers["x-amz-security-token"] == "some-token"
    assert "authorization" not in unsigned_headers
    assert not [name for name in signed_headers if "checksum" in name or name == "expect"]


async def test_a_prefix_keeps_a_store_to_its_part_of_the_bucket(moto_bucket):
    place, credentials = moto_bucket
    with closing(S3Store(place, credentials)) as whole:
        for path in ("one/a", "one-more/a", "two/a"):
            await whole.put(path, b"1")
        with closing(S3Store(place.model_copy(update={"prefix": "one/"}), credentials)) as part:
            await part.put("b", b"2")
            await part.delete("two/a")
            assert await paths(part, "") == ["a", "b"]
            assert await paths(part, "", "a") == ["b"]
        assert await paths(whole, "") == ["one-more/a", "one/a", "one/b", "two/a"]


# Every fault of HTTP and S3, each alone, between a node's stores and a real service. `bench.faults` runs pairs.


@pytest.mark.slow
async def test_nothing_is_lost_under_any_http_fault(rclone_bucket: Bucket):
    outcomes: dict[str, HttpOutcome] = {}
    slots = trio.CapacityLimiter(6)

    async def run(name: str) -> None:
        async with slots:
            outcomes[name] = await run_http_scenario(*rclone_bucket, (name,))

    async with trio.open_nursery() as nursery:
        for name in HTTP_FAULTS:
            nursery.start_soon(run, name)
    assert {name: outcome.violations for name, outcome in outcomes.items() if outcome.violations} == {}
    assert [name for name, outcome in outcomes.items() if not outcome.fault_count] == []
