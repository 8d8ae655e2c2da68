"""The doors through which signed records and content-addressed objects of other participants come in.

A record is believed only when everything about it agrees: it is no larger than its type allows, its signature holds,
its signer is the participant to whom the path belongs, it is of this run, and the path that follows from its own
fields is the very path that it was fetched from. Storage that swaps two true records, of two windows or of two miners,
is refused here like storage that bends one.

An object (a patch, an anchor, a payload, a file of the run) is believed only when its bytes have the digest and the
size that a record names.

Heads and manifests are judged by `protocol.chain.verifier`, which knows more of them; `fetch_envelope` gives it their
bytes. All of these functions raise NotFoundError if nothing lies at a path, TooLargeError if it is larger than it may
be, and another StoreError if the store did not answer.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

from protocol import limits, paths
from protocol.encoding import Record, content_digest
from protocol.environments.record import CodeRef
from protocol.errors import MalformedError, ProtocolError, error_context
from protocol.identity.signing import PublishedRecord, Signed, open_signed
from protocol.objects import ObjectRef
from protocol.run import FileRef
from roles.gather import first_success
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError, TooLargeError

P = TypeVar("P", bound=PublishedRecord)

FOREIGN: Final = (NotFoundError, TooLargeError, ProtocolError)
"""What reading raises if there is nothing at a path, or bytes of somebody else; another StoreError says nothing."""

_INLINE_BYTES = 1 << 14  # what is larger is checked off the event loop's thread


async def fetch_record(node: Node, record_type: type[P], path: str, max_bytes: int | None = None) -> Signed[P]:
    """Fetch the signed record that lies at a path, within a lower ceiling without its envelope where the run knows one;
    TooLargeError or ProtocolError if something else lies there.
    """
    ceiling = record_type.max_signed_bytes()
    if max_bytes is not None:
        ceiling = min(ceiling, max_bytes + limits.MAX_ENVELOPE_BYTES)
    data = await node.store.get(path, ceiling)
    if len(data) <= _INLINE_BYTES:
        return open_record(node, record_type, path, data)
    signed: Signed[P] = await node.run_sync(open_record, node, record_type, path, data)
    return signed


def open_record(node: Node, record_type: type[P], path: str, data: bytes) -> Signed[P]:
    """Check the bytes of a signed record that are said to lie at a path; ProtocolError if they are not a record of this
    type and run, signed by the path's writer alone, for this path.
    """
    if len(data) > record_type.max_signed_bytes():
        raise MalformedError(f"{len(data)} bytes are too many", path)
    with error_context(path):
        signed = open_signed(data, record_type, [paths.writer(path)])
    if signed.record.run != node.run_id:
        raise MalformedError("is of another run", path)
    if signed.record.path != path:
        raise MalformedError(f"belongs at {signed.record.path}", path)
    return signed


async def fetch_envelope(node: Node, record_type: type[Record], path: str) -> bytes:
    """Fetch the bytes of a head, manifest or revision, unchecked: its verifier checks them."""
    return await node.store.get(path, record_type.max_bytes + limits.MAX_ENVELOPE_BYTES)


async def fetch_object(node: Node, path: str, ref: ObjectRef | FileRef | CodeRef) -> bytes:
    """Fetch an object; MalformedError unless it has the size and the SHA-256 that a record names."""
    try:
        data = await node.store.get(path, ref.size)
    except TooLargeError as error:
        raise MalformedError(f"larger than the {ref.size} bytes that were named", path) from error
    inline = len(data) <= _INLINE_BYTES
    digest = content_digest(data) if inline else await node.run_sync(content_digest, data)
    if len(data) != ref.size or digest != ref.digest:
        raise MalformedError("not the bytes of this digest", path)
    return data


async def fetch_run_file(node: Node, ref: ObjectRef | FileRef | CodeRef, writers: Sequence[bytes], name: str) -> bytes:
    """Fetch a file of the run from the first of the writers' spaces that has it; `name` stands in errors. Raise the
    first failure as a StoreError if none has it: storage that is wrong now may be right later.
    """

    async def fetch(writer: bytes) -> bytes:
        try:
            return await fetch_object(node, paths.file(writer, ref.digest), ref)
        except NotFoundError as error:
            raise NotFoundError(f"{name}: its trainer has not published this file yet; start it, or wait") from error
        except MalformedError as error:
            raise StoreError(f"{name}: not the file that the run names, as storage shows it now") from error

    return await first_success(fetch, writers)
