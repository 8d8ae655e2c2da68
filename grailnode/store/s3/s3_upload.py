"""Multipart uploads: parts in parallel, resumed after a failure, orphans aborted.

A put that fails leaves its parts with the service. The next put of the same bytes to the same path sends only what is
missing: this process remembers the upload, and a new process finds it in the service's list and adopts the parts whose
ETag is the MD5 of what would be sent. That comparison saves bandwidth and proves nothing; readers check digests.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from grailnode.store.s3.s3_errors import UnknownUploadError, s3_errors
from grailnode.store.s3.s3_session import S3Location
from protocol.limits import MIB
from roles.gather import gather
from roles.ports import StoreError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

MAX_PARTS: Final = 10_000
"""Parts of one upload; S3's limit."""

PARTS_AT_ONCE: Final = 4
"""Parts of one object in flight; each holds a copy of its bytes."""

_MAX_PAGES: Final = 64  # of 1,000 uploads or parts; more than S3 lets an upload have

T = TypeVar("T")


class Runner(Protocol):
    """Does blocking work that moves `size` bytes, in a worker thread within its deadline."""

    def __call__(self, where: str, size: int, work: Callable[[], T]) -> Awaitable[T]: ...


@dataclass
class _Upload:
    """An upload under way: what it is of, and the ETags of the parts that arrived, by number from 1."""

    upload_id: str
    digest: bytes
    etags: dict[int, str] = field(default_factory=dict)


class Uploads:
    """The multipart uploads of one store."""

    def __init__(self, client: "S3Client", location: S3Location, run: Runner) -> None:
        self._client = client
        self._location = location
        self._run = run
        self._unfinished: dict[str, _Upload] = {}

    async def put(self, path: str, data: bytes) -> None:
        """Send an object in parts and make it one.

        Raises:
            StoreError: it may or may not have been stored; the parts that arrived are kept for the next attempt.
        """
        size = _part_size(len(data), self._location.part_bytes)
        parts = {number + 1: (start, size) for number, start in enumerate(range(0, len(data), size))}
        upload = await self._open(path, data, parts)
        arrived = len(upload.etags)
        try:
            await self._send_missing(path, data, parts, upload)
        except StoreError:
            if len(upload.etags) == arrived:  # perhaps it is the service's memory of this upload that is broken
                del self._unfinished[path]
            raise
        # whether this succeeds or not: an upload whose answer was lost may be complete, and must not be asked for again
        del self._unfinished[path]
        await self._complete(path, upload)

    async def abort_older(self, prefix: str, before: float) -> int:
        """Abort uploads below `prefix` that began before a moment (seconds since the epoch): how many."""
        aborted = 0
        for path, upload_id, began in await self._listed(prefix):
            if began < before:
                await self._abort(path, upload_id)
                aborted += 1
        return aborted

    async def _open(self, path: str, data: bytes, parts: dict[int, tuple[int, int]]) -> _Upload:
        digest = await self._run(self._name(path), len(data), lambda: hashlib.sha256(data).digest())
        upload = self._unfinished.get(path)
        if upload is not None and upload.digest == digest:
            return upload
        upload = await self._adopt(path, data, digest, parts)
        if upload is None:
            upload = _Upload(await self._create(path), digest)
        self._unfinished[path] = upload
        return upload

    async def _adopt(self, path: str, data: bytes, digest: bytes, parts: dict[int, tuple[int, int]]) -> _Upload | None:
        """An unfinished upload of the same bytes, left by a process that died; others to this path are aborted."""
        adopted = None
        try:
            for _, upload_id, _ in [found for found in await self._listed(path) if found[0] == path]:
                etags = await self._arrived(path, upload_id)
                same = await self._run(self._name(path), len(data), partial(_same, etags, data, parts))
                if adopted is None and same and len(same) == len(etags):
                    adopted = _Upload(upload_id, digest, same)
                else:
                    await self._abort(path, upload_id)
        except StoreError:
            return adopted  # services and policies may refuse to list uploads; then nothing is resumed
        return adopted

    async def _send_missing(self, path: str, data: bytes, parts: dict[int, tuple[int, int]], upload: _Upload) -> None:
        missing = [number for number in parts if number not in upload.etags]

        async def send_part(number: int) -> None:
            upload.etags[number] = await self._send(path, data, number, parts[number], upload.upload_id)

        await gather(send_part, missing, PARTS_AT_ONCE, errors=(StoreError,), cancel_others=False)

    async def _send(self, path: str, data: bytes, number: int, part: tuple[int, int], upload_id: str) -> str:
        start, size = part

        def work() -> str:
            with s3_errors(self._name(path)):
                answer = self._client.upload_part(
                    Bucket=self._location.bucket,
                    Key=path,
                    UploadId=upload_id,
                    PartNumber=number,
                    Body=data[start : start + size],
                )
            return _text(answer.get("ETag"), self._name(path), "ETag")

        return await self._run(self._name(path), size, work)

    async def _create(self, path: str) -> str:
        def work() -> str:
            with s3_errors(self._name(path)):
                answer = self._client.create_multipart_upload(Bucket=self._location.bucket, Key=path)
            return _text(answer.get("UploadId"), self._name(path), "upload id")

        return await self._run(self._name(path), 0, work)

    async def _complete(self, path: str, upload: _Upload) -> None:
        def work() -> None:
            with s3_errors(self._name(path)):
                self._client.complete_multipart_upload(
                    Bucket=self._location.bucket,
                    Key=path,
                    UploadId=upload.upload_id,
                    MultipartUpload={
                        "Parts": [{"ETag": etag, "PartNumber": n} for n, etag in sorted(upload.etags.items())]
                    },
                )

        await self._run(self._name(path), 0, work)

    async def _abort(self, path: str, upload_id: str) -> None:
        def work() -> None:
            with s3_errors(self._name(path)):
                self._client.abort_multipart_upload(Bucket=self._location.bucket, Key=path, UploadId=upload_id)

        try:
            await self._run(self._name(path), 0, work)
        except UnknownUploadError:
            return  # gone already

    async def _listed(self, prefix: str) -> list[tuple[str, str, float]]:
        """Unfinished uploads below a prefix: path, upload id, when it began (seconds since the epoch)."""

        def page(marks: dict[str, Any]) -> tuple[list[tuple[str, str, float]], dict[str, Any]]:
            with s3_errors(self._name(prefix)):
                answer = self._client.list_multipart_uploads(Bucket=self._location.bucket, Prefix=prefix, **marks)
                found = [
                    (item["Key"], item["UploadId"], item["Initiated"].timestamp())
                    for item in answer.get("Uploads", [])
                    if "Key" in item and "UploadId" in item and "Initiated" in item
                ]
                following = {
                    "KeyMarker": answer.get("NextKeyMarker"),
                    "UploadIdMarker": answer.get("NextUploadIdMarker"),
                }
                return found, _more(answer.get("IsTruncated"), following)

        return await self._pages(prefix, page)

    async def _arrived(self, path: str, upload_id: str) -> dict[int, str]:
        """ETags of the parts that the service holds, by number."""

        def page(marks: dict[str, Any]) -> tuple[list[tuple[int, str]], dict[str, Any]]:
            with s3_errors(self._name(path)):
                answer = self._client.list_parts(Bucket=self._location.bucket, Key=path, UploadId=upload_id, **marks)
                found = [
                    (item["PartNumber"], item["ETag"])
                    for item in answer.get("Parts", [])
                    if "PartNumber" in item and "ETag" in item
                ]
                following = {"PartNumberMarker": answer.get("NextPartNumberMarker")}
                return found, _more(answer.get("IsTruncated"), following)

        return dict(await self._pages(path, page))

    async def _pages(self, where: str, page: Callable[[dict[str, Any]], tuple[list[T], dict[str, Any]]]) -> list[T]:
        """All that the pages hold.

        Raises:
            StoreError: a page cannot be had, or they do not end.
        """
        found: list[T] = []
        marks: dict[str, Any] = {}
        for _ in range(_MAX_PAGES):
            more, following = await self._run(self._name(where), 0, partial(page, marks))
            found += more
            if not following:
                return found
            if following == marks:
                break
            marks = following
        raise StoreError(f"{self._name(where)}: the list of uploads does not end")

    def _name(self, path: str) -> str:
        return f"s3://{self._location.bucket}/{path}"


def _more(truncated: bool | None, following: dict[str, Any]) -> dict[str, Any]:
    """What asks for the next page; nothing where there is none."""
    return {name: value for name, value in following.items() if value} if truncated else {}


def _part_size(total: int, wanted: int) -> int:
    """Bytes of a part: as wanted, or more (in whole MiB) where that would make too many parts."""
    least = -(-total // MAX_PARTS)
    return wanted if least <= wanted else -(-least // MIB) * MIB


def _same(etags: dict[int, str], data: bytes, parts: dict[int, tuple[int, int]]) -> dict[int, str]:
    """Those ETags that are the MD5 of the part that would be sent under their number."""
    return {n: etag for n, etag in etags.items() if n in parts and etag.strip('"') == _md5(data, parts[n])}


def _md5(data: bytes, part: tuple[int, int]) -> str:
    start, size = part
    return hashlib.md5(data[start : start + size], usedforsecurity=False).hexdigest()


def _text(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise StoreError(f"{where}: the service gave no {what}")
    return value
