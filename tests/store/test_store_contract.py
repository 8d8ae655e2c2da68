"""The contract suite of ObjectStore, for every store and for decorators that must be transparent."""

import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trio

import grailnode.store.local
import grailnode.store.memory
import grailnode.store.s3.s3_store
from grailnode.store.decorators.caching import CachedStore
from grailnode.store.decorators.disk_cache import DiskCache
from grailnode.store.decorators.limiting import LimitedStore, RequestLimits
from grailnode.store.decorators.metering import MeteredStore
from grailnode.store.decorators.prefixed import PrefixedStore
from grailnode.store.decorators.retrying import RetryingStore, RetryPolicy
from grailnode.store.https.https_store import HttpsStore, open_client
from grailnode.store.local import LocalStore
from grailnode.store.memory import MemoryStore
from grailnode.store.s3.s3_store import S3Store
from grailnode.store.state.state_store import StateStore
from roles.ports import ObjectStore
from tests.store.store_contract import ReadContract, Seed, StoreContract
from tests.support.faults.faulty_store import FaultyStore
from tests.support.measuring.store_tally import TallyMeter
from tests.support.servers.loopback import serve
from tests.support.servers.served_files import FileServer

BRIEF = RetryPolicy(attempts=4, first_pause=0.01)


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryStore()

    @pytest.fixture
    def small_pages(self, monkeypatch):
        monkeypatch.setattr(grailnode.store.memory, "PAGE", 4)


class TestLocal(StoreContract):
    @pytest.fixture(params=[False, True], ids=["threads", "inline"])
    def store(self, tmp_path: Path, request) -> ObjectStore:
        return LocalStore(tmp_path / "store", inline=request.param)

    @pytest.fixture
    def small_pages(self, monkeypatch):
        monkeypatch.setattr(grailnode.store.local, "PAGE", 4)


class TestState(StoreContract):
    @pytest.fixture(params=[False, True], ids=["threads", "inline"])
    def store(self, tmp_path: Path, request) -> ObjectStore:
        return StateStore(tmp_path / "state", bytes(32), inline=request.param)

    @pytest.fixture
    def small_pages(self, monkeypatch):
        monkeypatch.setattr(grailnode.store.local, "PAGE", 4)


class TestDecorated(StoreContract):
    """Several decorators at once, which must not change the contract."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        whole = MemoryStore()
        rng = random.Random(1)
        limits = RequestLimits(concurrency=3, rate=1e6, burst=1000, max_put_bytes=10**6, max_get_bytes=10**6)
        limited = LimitedStore(FaultyStore(whole, rng), limits)
        return PrefixedStore(MeteredStore(RetryingStore(limited, rng, BRIEF), TallyMeter()), "participant/one/")

    @pytest.fixture
    def small_pages(self, monkeypatch):
        monkeypatch.setattr(grailnode.store.memory, "PAGE", 4)


class TestCached(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return CachedStore(MemoryStore(), DiskCache(tmp_path / "cache", 10**6))

    @pytest.fixture
    def small_pages(self, monkeypatch):
        monkeypatch.setattr(grailnode.store.memory, "PAGE", 4)


class S3Contract(StoreContract):
    @pytest.fixture
    def store(self, bucket) -> Iterator[ObjectStore]:
        store = S3Store(*bucket)
        # as nodes use it, because rclone answers 500 to a put whose folder a deletion has just emptied
        yield RetryingStore(store, random.Random(1), BRIEF)
        store.close()

    @pytest.fixture
    def small_pages(self, monkeypatch):
        monkeypatch.setattr(grailnode.store.s3.s3_store, "PAGE", 4)

    @pytest.mark.skip(reason="this service allows it; the protocol's paths never need it")
    async def test_an_object_is_no_folder_and_a_folder_no_object(self, store: ObjectStore) -> None: ...


class TestS3OfRclone(S3Contract):
    hidden_while_overwritten = True

    @pytest.fixture
    def bucket(self, rclone_bucket):
        return rclone_bucket

    @pytest.mark.skip(reason="rclone removes the folder and what lies in it; the protocol deletes objects by full path")
    async def test_deleting_a_folder_deletes_nothing(self, store: ObjectStore) -> None: ...

    @pytest.mark.skip(reason="rclone answers 500 for long where one client empties the folder another writes to")
    async def test_writers_and_deleters_share_a_folder(self, store: ObjectStore) -> None: ...


class TestS3OfMoto(S3Contract):
    @pytest.fixture
    def bucket(self, moto_bucket):
        return moto_bucket


class TestHttps(ReadContract):
    @pytest.fixture
    def server(self) -> FileServer:
        return FileServer()

    @pytest.fixture
    async def client(self):
        async with open_client() as client:
            yield client

    @pytest.fixture
    async def store(self, server: FileServer, client: httpx.AsyncClient, nursery: trio.Nursery) -> ObjectStore:
        url = await nursery.start(serve, server.answer)
        return HttpsStore(f"{url}/public", client, plain_http=True)

    @pytest.fixture
    def seed(self, server: FileServer) -> Seed:
        async def put(path: str, data: bytes) -> None:
            server.objects[f"/public/{path}"] = data

        return put
