"""sweep_orphans: a writer aborts its own old multipart uploads when it starts, and no others."""

import time
from pathlib import Path

import pytest
import trio
from botocore.exceptions import ConnectionClosedError

from grailnode.config import Config, load
from grailnode.node.stores import sweep_orphans
from grailnode.run import workspace
from grailnode.run.creation import Choices
from grailnode.store.s3.s3_errors import UnsupportedError
from grailnode.store.s3.s3_store import S3Store
from protocol.limits import MIB
from roles.ports import StoreError
from tests.store.s3_buckets import CREDENTIALS, Bucket
from tests.support.simulation.network import Log

MINE, THEIRS = b"m" * 32, b"t" * 32
DAY = 86_400.0


@pytest.fixture
def bucket(rclone_bucket: Bucket) -> Bucket:
    return rclone_bucket  # moto reports 2010 as the start of every upload


@pytest.fixture(params=["", "runs/one"], ids=["whole-bucket", "prefix"])
def config(request, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The configuration of a node with this bucket as its store."""
    location, _ = bucket
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CREDENTIALS.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CREDENTIALS.secret_key)
    values = {"kind": "s3", "bucket": location.bucket, "endpoint": location.endpoint, "addressing": "path"}
    values |= {"prefix": request.param} if request.param else {}
    return load(
        workspace.create(tmp_path, Choices(), workspace.Pace()).config,
        [f"store.{k}={v}" for k, v in values.items()],
    )


def leave_unfinished_upload(store: S3Store, path: str) -> None:
    """Upload the parts of an object, and fail before the completion."""

    def fail(event_name: str, **_: object) -> None:
        raise ConnectionClosedError(endpoint_url="the wire")

    store._session.client.meta.events.register("request-created.s3.CompleteMultipartUpload", fail)
    with pytest.raises(StoreError):
        trio.run(store.put, path, bytes(17 * MIB))


def test_a_writer_sweeps_its_own_uploads_when_they_are_a_day_old(config: Config, bucket: Bucket):
    store = S3Store(*bucket)
    under = f"{config.store.prefix}/" if config.store.prefix else ""
    for owner in (MINE, THEIRS):
        leave_unfinished_upload(store, f"{under}{owner.hex()}/anchors/a")
    log = Log("miner")
    trio.run(sweep_orphans, config, MINE, log, time.time())
    trio.run(sweep_orphans, config, MINE, log, time.time() + DAY + 60)
    trio.run(sweep_orphans, config, MINE, log, time.time() + DAY + 60)
    assert log.events == [("orphans-swept", {"uploads": 1})]  # nothing at the first and the last sweep
    assert trio.run(store.abort_uploads, "", time.time() + 60) == 1  # the other owner's is still there
    store.close()


def test_a_bucket_in_which_no_upload_ever_began_causes_no_event(config: Config):
    log = Log("miner")
    trio.run(sweep_orphans, config, MINE, log, time.time())
    assert log.events == []


def test_a_service_that_refuses_causes_one_event(config: Config):
    misconfigured = config.model_copy(update={"store": config.store.model_copy(update={"bucket": "no-such-bucket"})})
    log = Log("miner")
    trio.run(sweep_orphans, misconfigured, MINE, log, time.time())
    [(name, fields)] = log.events
    assert name == "orphan-sweep-failed"
    assert "\n" not in fields["error"]


def test_a_service_that_lists_no_uploads_causes_no_event(config: Config, monkeypatch: pytest.MonkeyPatch):
    async def abort_uploads(self: S3Store, prefix: str, before: float) -> int:
        raise UnsupportedError("s3://bucket: the service does not implement this")

    monkeypatch.setattr(S3Store, "abort_uploads", abort_uploads)
    log = Log("miner")
    trio.run(sweep_orphans, config, MINE, log, time.time())
    assert log.events == []


def test_a_local_store_has_no_uploads_to_abort(tmp_path: Path):
    config = load(workspace.create(tmp_path, Choices(), workspace.Pace()).config, [])
    log = Log("miner")
    trio.run(sweep_orphans, config, MINE, log, time.time())
    assert log.events == []
