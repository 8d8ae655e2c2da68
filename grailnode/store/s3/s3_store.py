"""Stores objects in a bucket of any S3-compatible service: AWS, Cloudflare R2, MinIO, rclone.

boto3 runs in trio's worker threads, a bounded number at a time. A request that exceeds its deadline is abandoned: the
caller receives a StoreError, while the thread ends at botocore's own timeouts. An abandoned put may still take effect.
RetryingStore retries; botocore does not.
"""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import trio

from grailnode.store.checks import PageCheck, begins_at, check_path, check_prefix, check_range
from grailnode.store.place import PlaceSection
from grailnode.store.s3.s3_session import RangeBeyondEndError, S3Credentials, S3Session, s3_errors
from protocol.limits import MIB
from roles.gather import gather
from roles.ports import ObjectInfo, StoreError, TooLargeError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

MAX_PARTS: Final = 10_000
"""Parts of one upload; S3's maximum."""

CONCURRENT_PARTS: Final = 4
"""Parts of one object that are sent at the same time; each is a copy of its bytes in memory."""


T = TypeVar("T")


class Runner(Protocol):
    """Runs blocking work that transfers `size` bytes of an object, in a worker thread, until its deadline."""

    def __call__(self, key: str, size: int, work: Callable[[], T]) -> Awaitable[T]: ...


@dataclass
class _Upload:
    """An upload under way: the service's name for it, and the ETags of the parts that arrived, by number from 1."""

    upload_id: str
    digest: bytes
    etags: dict[int, str] = field(default_factory=dict)


class Uploads:
    """The multipart uploads of one store. Those that are given up, or of a dead process, are left to the service."""

    def __init__(self, client: "S3Client", bucket: str, part_bytes: int, run: Runner) -> None:
        self._client = client
        self._bucket, self._part_bytes = bucket, part_bytes
        self._run = run
        self._unfinished: dict[str, _Upload] = {}

    async def put(self, path: str, data: bytes) -> None:
        size = _part_size(len(data), self._part_bytes)
        parts = {number + 1: (start, size) for number, start in enumerate(range(0, len(data), size))}
        upload = await self._open(path, data)
        part_count = len(upload.etags)
        try:
            remaining_numbers = [number for number in parts if number not in upload.etags]

            async def send_part(number: int) -> None:
                upload.etags[number] = await self._send(path, data, number, parts[number], upload.upload_id)

            await gather(send_part, remaining_numbers, CONCURRENT_PARTS, errors=(StoreError,), cancel_others=False)
            await self._complete(path, upload)
        except StoreError:
            # No progress: the service may have lost the upload, or have completed it, and only its response was lost.
            if len(upload.etags) == part_count:
                self._unfinished.pop(path, None)
            raise
        self._unfinished.pop(path, None)

    async def _open(self, path: str, data: bytes) -> _Upload:
        digest = await self._run(path, len(data), lambda: hashlib.sha256(data).digest())
        upload = self._unfinished.get(path)
        if upload is not None and upload.digest == digest:
            return upload
        request = partial(self._client.create_multipart_upload, Bucket=self._bucket, Key=path)
        upload_id = (await self._run(path, 0, request)).get("UploadId")
        self._unfinished[path] = _Upload(self._text(upload_id, path, "upload id"), digest)
        return self._unfinished[path]

    async def _send(self, path: str, data: bytes, number: int, part: tuple[int, int], upload_id: str) -> str:
        start, size = part
        response = await self._run(
            path,
            size,
            lambda: self._client.upload_part(
                Bucket=self._bucket, Key=path, UploadId=upload_id, PartNumber=number, Body=data[start : start + size]
            ),
        )
        return self._text(response.get("ETag"), path, "ETag")

    async def _complete(self, path: str, upload: _Upload) -> None:
        parts: Any = {"Parts": [{"ETag": etag, "PartNumber": n} for n, etag in sorted(upload.etags.items())]}
        request = partial(self._client.complete_multipart_upload, Bucket=self._bucket, Key=path)
        await self._run(path, 0, partial(request, UploadId=upload.upload_id, MultipartUpload=parts))

    def _text(self, value: Any, path: str, what: str) -> str:
        if not isinstance(value, str) or not value:
            raise StoreError(f"s3://{self._bucket}/{path}: the service sent no {what}")
        return value


def _part_size(total_bytes: int, preferred_bytes: int) -> int:
    """Return the bytes of a part: the preferred ones, or more (in whole MiB) when there would be too many parts."""
    least_bytes = -(-total_bytes // MAX_PARTS)
    return preferred_bytes if least_bytes <= preferred_bytes else -(-least_bytes // MIB) * MIB


if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef

PAGE: Final = 1000
"""Keys of one page; S3's maximum."""
PART_BYTES: Final = 16 * MIB

_CHUNK_BYTES: Final = 256 * 1024
_SPARE_THREADS: Final = 16  # for abandoned requests that have not ended yet


class S3Store:
    """Implements ObjectStore with a bucket, or with the part of one below the place's prefix.

    Credentials sign the requests; there are none for a public bucket. Larger objects than `part_bytes` are uploaded in
    parts of this size, several at a time; it is at least 5 MiB, as S3 demands.
    """

    def __init__(self, place: PlaceSection, credentials: S3Credentials | None, part_bytes: int = PART_BYTES) -> None:
        self._place, self._part_bytes = place, part_bytes
        self._session = S3Session(place, credentials)
        self._client, self._bucket = self._session.client, place.bucket
        self._prefix = f"{place.prefix.rstrip('/')}/" if place.prefix else ""
        self._slots = trio.CapacityLimiter(place.concurrency)
        self._threads = trio.CapacityLimiter(place.concurrency + _SPARE_THREADS)
        self._uploads = Uploads(self._client, place.bucket, part_bytes, self._run)

    def close(self) -> None:
        """Close the connections. No request may be running."""
        self._session.close()

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put. Large objects are uploaded in parts; a repeated put resumes one that failed."""
        key = self._prefix + check_path(path)
        if len(data) > self._part_bytes:
            await self._uploads.put(key, data)
            return
        await self._run(key, len(data), lambda: self._client.put_object(Bucket=self._bucket, Key=key, Body=data))

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        key = self._prefix + check_path(path)
        check_range(max_bytes, offset, size)
        expected_bytes = max_bytes if size is None else min(size, max_bytes)
        try:
            return await self._run(key, expected_bytes, lambda: self._get(key, max_bytes, offset, size))
        except RangeBeyondEndError:
            return b""

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list. Keys that no put could have created are left out."""
        whole, start = self._prefix + check_prefix(prefix), self._prefix + after if after else ""
        check = PageCheck(f"s3://{self._bucket}/{whole}", whole, start)
        token: str | None = None
        while True:
            begin: dict[str, Any] = {"StartAfter": start} if token is None else {"ContinuationToken": token}
            request = partial(self._client.list_objects_v2, Bucket=self._bucket, Prefix=whole, MaxKeys=PAGE, **begin)
            page = await self._run(whole, 0, request)
            entries = [(item.get("Key", ""), item.get("Size", 0)) for item in page.get("Contents", [])]
            for info in check.objects(entries):
                yield ObjectInfo(info.path.removeprefix(self._prefix), info.size)
            token = page.get("NextContinuationToken") if page.get("IsTruncated") else None
            if token is None:
                return
            check.check_progress()

    async def delete(self, path: str) -> None:
        key = self._prefix + check_path(path)
        await self._run(key, 0, lambda: self._client.delete_object(Bucket=self._bucket, Key=key))

    async def _run(self, key: str, size: int, work: Callable[[], T]) -> T:
        """Run `work`, which transfers `size` bytes, in a worker thread until its deadline."""
        where, seconds = f"s3://{self._bucket}/{key}", self._place.seconds_for(size)

        def translated() -> T:
            with s3_errors(where):
                return work()

        async with self._slots:
            try:
                with trio.fail_after(seconds):
                    return await trio.to_thread.run_sync(translated, limiter=self._threads, abandon_on_cancel=True)
            except trio.TooSlowError as error:
                raise StoreError(f"{where}: no answer within {seconds:.0f} s") from error

    def _get(self, key: str, max_bytes: int, offset: int, size: int | None) -> bytes:
        where = f"s3://{self._bucket}/{key}"
        if offset == 0 and size is None:
            response = self._client.get_object(Bucket=self._bucket, Key=key)
        else:
            # an empty range cannot be requested: request one byte, to learn whether the object exists
            last = "" if size is None else str(offset + max(size, 1) - 1)
            response = self._client.get_object(Bucket=self._bucket, Key=key, Range=f"bytes={offset}-{last}")
            if not begins_at(response.get("ContentRange", ""), offset):
                response["Body"].close()
                raise StoreError(f"{where}: the service did not send the requested range")
        if size == 0:
            response["Body"].close()
            return b""
        return _read(response, max_bytes, where)


def _read(response: "GetObjectOutputTypeDef", max_bytes: int, where: str) -> bytes:
    body = response["Body"]
    try:
        if response.get("ContentLength", 0) > max_bytes:
            raise TooLargeError(f"{where}: {response['ContentLength']} bytes where at most {max_bytes} are allowed")
        pieces = []
        remaining_bytes = max_bytes
        while piece := body.read(min(_CHUNK_BYTES, remaining_bytes + 1)):
            remaining_bytes -= len(piece)
            if remaining_bytes < 0:
                raise TooLargeError(f"{where}: more than {max_bytes} bytes")
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        body.close()
