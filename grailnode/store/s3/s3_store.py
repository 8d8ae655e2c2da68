"""Objects in a bucket of any S3-compatible service: AWS, Cloudflare R2, MinIO, rclone.

boto3 works in trio's worker threads, a bounded number at a time. A request that outlives its deadline is abandoned:
the caller goes on with a StoreError while the thread ends at botocore's own timeouts; an abandoned put may still
arrive. Retries are the business of RetryingStore; botocore makes none.
"""

import re
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from grailnode.store.names import check_path, check_prefix, check_range, is_path
from grailnode.store.s3.s3_errors import RangeBeyondEndError, s3_errors
from grailnode.store.s3.s3_session import S3Credentials, S3Location, S3Session
from grailnode.store.s3.s3_upload import Uploads
from roles.ports import ObjectInfo, StoreError, TooLargeError

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef, ListObjectsV2OutputTypeDef

PAGE: Final = 1000
"""Keys of one answer; the most that S3 gives."""

_CHUNK: Final = 256 * 1024
_SPARE_THREADS: Final = 16  # for requests that were abandoned and have not ended yet
_EMPTY_PAGES: Final = 8  # in a row that say there is more to come
_content_range = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/(?:[0-9]{1,18}|\*)")

T = TypeVar("T")


class S3Store:
    """Objects in one bucket; wrap it in PrefixedStore for a part of one.

    Args:
        location: the bucket and how to reach it.
        credentials: what signs requests; None to ask as nobody, for public buckets.
    """

    def __init__(self, location: S3Location, credentials: S3Credentials | None) -> None:
        self._location = location
        self._session = S3Session(location, credentials)
        self._slots = trio.CapacityLimiter(location.connections)
        self._threads = trio.CapacityLimiter(location.connections + _SPARE_THREADS)
        self._uploads = Uploads(self._session.client, location, self._run)

    def close(self) -> None:
        """Close the connections; no request may be running."""
        self._session.close()

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put; large objects go up in parts, and a repeated put resumes where one failed."""
        check_path(path)
        if len(data) > self._location.part_bytes:
            await self._uploads.put(path, data)
            return
        client, bucket = self._session.client, self._location.bucket

        def work() -> None:
            with s3_errors(self._name(path)):
                client.put_object(Bucket=bucket, Key=path, Body=data)

        await self._run(self._name(path), len(data), work)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get."""
        check_path(path)
        check_range(max_bytes, offset, size)
        wanted = max_bytes if size is None else min(size, max_bytes)
        try:
            return await self._run(self._name(path), wanted, lambda: self._get(path, max_bytes, offset, size))
        except RangeBeyondEndError:
            return b""

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list. Keys that no put could have made are left out.

        Raises:
            StoreError: also for pages that run backwards or have no end.
        """
        check_prefix(prefix)
        token: str | None = None
        latest, empty = "", 0
        while True:
            page = await self._page(prefix, after, token)
            keys = [(item.get("Key", ""), item.get("Size", 0)) for item in page.get("Contents", [])]
            for key, size in keys:
                if key <= latest:
                    raise StoreError(f"{self._name(prefix)}: the listing runs backwards at {key[:80]!r}")
                latest = key
                # a service may ignore where to begin, and hold keys that no put could have made
                if key > after and key.startswith(prefix) and is_path(key):
                    yield ObjectInfo(key, size)
            token = page.get("NextContinuationToken") if page.get("IsTruncated") else None
            if token is None:
                return
            given = any(key.startswith(prefix) and (key <= after or is_path(key)) for key, _ in keys)
            empty = 0 if given else empty + 1
            if empty > _EMPTY_PAGES:
                raise StoreError(f"{self._name(prefix)}: the listing promises more and gives nothing")

    async def delete(self, path: str) -> None:
        """Implements ObjectStore.delete."""
        check_path(path)
        client, bucket = self._session.client, self._location.bucket

        def work() -> None:
            with s3_errors(self._name(path)):
                client.delete_object(Bucket=bucket, Key=path)

        await self._run(self._name(path), 0, work)

    async def abort_uploads(self, prefix: str, before: float) -> int:
        """Abort multipart uploads below `prefix` that began before a moment: how many.

        For the writer of the prefix, when it starts: parts of an upload that nobody completes are stored and billed.

        Args:
            before: seconds since the Unix epoch, by the service's clock.

        Raises:
            StoreError: the service refused.
        """
        return await self._uploads.abort_older(check_prefix(prefix), before)

    def _name(self, path: str) -> str:
        return f"s3://{self._location.bucket}/{path}"

    async def _run(self, where: str, size: int, work: Callable[[], T]) -> T:
        """Do `work`, which moves `size` bytes, in a worker thread within its deadline."""
        seconds = self._location.seconds_for(size)
        async with self._slots:
            try:
                with trio.fail_after(seconds):
                    return await trio.to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)
            except trio.TooSlowError as error:
                raise StoreError(f"{where}: no answer within {seconds:.0f} s") from error

    def _get(self, path: str, max_bytes: int, offset: int, size: int | None) -> bytes:
        where = self._name(path)
        client, bucket = self._session.client, self._location.bucket
        with s3_errors(where):
            if offset == 0 and size is None:
                answer = client.get_object(Bucket=bucket, Key=path)
            else:
                # a range of no bytes cannot be asked for: ask for one, to see whether the object is there
                last = "" if size is None else str(offset + max(size, 1) - 1)
                answer = client.get_object(Bucket=bucket, Key=path, Range=f"bytes={offset}-{last}")
                _check_answered_range(answer, offset, where)
            if size == 0:
                answer["Body"].close()
                return b""
            return _read(answer, max_bytes, where)

    async def _page(self, prefix: str, after: str, token: str | None) -> "ListObjectsV2OutputTypeDef":
        client, bucket = self._session.client, self._location.bucket

        def work() -> "ListObjectsV2OutputTypeDef":
            with s3_errors(self._name(prefix)):
                if token is not None:
                    return client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=PAGE, ContinuationToken=token)
                return client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=PAGE, StartAfter=after)

        return await self._run(self._name(prefix), 0, work)


def _check_answered_range(answer: "GetObjectOutputTypeDef", offset: int, where: str) -> None:
    match = _content_range.fullmatch(answer.get("ContentRange", ""))
    if match is None or int(match[1]) != offset:
        answer["Body"].close()
        raise StoreError(f"{where}: the service does not answer the range that was asked for")


def _read(answer: "GetObjectOutputTypeDef", max_bytes: int, where: str) -> bytes:
    """The body, unless it is larger than allowed; then no more than one chunk beyond is read."""
    body = answer["Body"]
    try:
        if answer.get("ContentLength", 0) > max_bytes:
            raise TooLargeError(f"{where}: {answer['ContentLength']} bytes where at most {max_bytes} are wanted")
        pieces = []
        room = max_bytes
        while piece := body.read(min(_CHUNK, room + 1)):
            room -= len(piece)
            if room < 0:
                raise TooLargeError(f"{where}: more than {max_bytes} bytes")
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        body.close()
