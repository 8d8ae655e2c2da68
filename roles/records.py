"""The one door through which signed records of other participants come in.

A record is believed only when everything about it agrees: it is no larger than its type allows, its signature holds,
its signer is the participant to whom the path belongs, it is of this run, and the path that follows from its own
fields is the very path that it was fetched from. Storage that swaps two true records, of two windows or of two miners,
is refused here like storage that bends one.

Heads and manifests are judged by `protocol.chain.verifier`, which knows more of them; `fetch_envelope` gives it their
bytes.
"""

from typing import TypeVar

from protocol import limits, paths
from protocol.encoding import Record
from protocol.errors import MalformedError, error_context
from protocol.identity.signing import PublishedRecord, Signed, open_signed
from roles.node.identity import Node

P = TypeVar("P", bound=PublishedRecord)

_INLINE_BYTES = 1 << 14  # what is larger is checked off the event loop's thread


async def fetch_record(node: Node, record_type: type[P], path: str, max_bytes: int | None = None) -> Signed[P]:
    """Fetch the signed record that lies at a path, and check it.

    Args:
        record_type: what must lie there.
        max_bytes: a lower ceiling for the record without its envelope, where the run knows one; default: its type's.

    Raises:
        NotFoundError: nothing lies there.
        StoreError: the store did not answer.
        TooLargeError, ProtocolError: what lies there is not that record.
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
    """Check the bytes of a signed record that are said to lie at a path.

    Raises:
        ProtocolError: they are not a record of this type and run, signed by the path's writer alone, for this path.
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
    """Fetch the bytes of a head, manifest or revision, unchecked: its verifier checks them.

    Raises:
        NotFoundError: nothing lies there.
        StoreError: the store did not answer.
        TooLargeError: what lies there is larger than such a record with its envelope can be.
    """
    return await node.store.get(path, record_type.max_bytes + limits.MAX_ENVELOPE_BYTES)
