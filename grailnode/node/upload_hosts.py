"""The upload processes of a trainer on several hosts: host 0 asks, and the others do what it asks for.

Each other host keeps two connections to host 0, at the port above that of the meeting: an anchor's upload must not
delay a version. A message has two lengths, a canonical msgpack value, and bytes. A host that works on an answer sends
empty messages meanwhile, so that one that hangs is noticed. What is asked can be asked again, so a connection that
breaks only delays it. Of two processes with one host's number the one that connected last is asked, the other ends.
There are no passwords, as in torch.distributed (docs/guide/train.md).
"""

import math
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import trio
from blake3 import blake3

from grailnode import UserError
from grailnode.node.process_launch import LostRankError
from protocol import limits
from protocol.digest import dtypes, outline, type_name
from protocol.encoding import pack, unpack
from protocol.errors import LimitError, MalformedError, PatchError, ProtocolError
from protocol.objects import ObjectRef
from protocol.patch.codec import EncodedTensor
from protocol.patch.container import read_header, split_frames, write_container
from roles.gather import first_failure
from roles.node.identity import Node
from roles.node.retries import ChangeReporter, WaitReporter
from roles.trainer.publish.host_files import Base, EncodedFiles, HostFiles
from roles.trainer.tensor_shards import RunSync

_LANES: Final = 2  # connections of a host; the second one is for anchors
_LENGTHS: Final = struct.Struct(">IQ")
_GREETING_BYTES: Final = 1024  # at most, of what somebody sends who connects
_DIGEST_BYTES: Final = 32
_POLL_SECONDS: Final = 0.2
_SILENT_SECONDS: Final = 30  # after which a link counts as cut
_BEAT_SECONDS: Final = 10
_HUNG_SECONDS: Final = 120  # without a byte, after which a host that should send something counts as hung
_BROKEN: Final = (trio.BrokenResourceError, trio.ClosedResourceError, ProtocolError)

Message = tuple[Any, bytes]


async def _send(stream: trio.abc.SendStream, value: Any, data: bytes = b"") -> None:
    packed = pack(value)
    await stream.send_all(_LENGTHS.pack(len(packed), len(data)) + packed)
    await stream.send_all(data)


async def _receive(
    stream: trio.abc.ReceiveStream, max_bytes: int = limits.MAX_PATCH_BYTES, seconds: float = _HUNG_SECONDS
) -> Message:
    """Return the next message, which begins within some seconds."""
    sizes = _LENGTHS.unpack(await _read(stream, _LENGTHS.size, seconds))
    if sum(sizes) > max_bytes:
        raise LimitError(f"a message of {sum(sizes)} bytes")
    packed, data = [await _read(stream, size) for size in sizes]
    return unpack(packed, limits.MAX_PATCH_HEADER_BYTES), data


async def _read(stream: trio.abc.ReceiveStream, size: int, seconds: float = _HUNG_SECONDS) -> bytes:
    data = bytearray()
    while len(data) < size:
        with trio.move_on_after(seconds) as scope:
            piece = await stream.receive_some(size - len(data))
        if scope.cancelled_caught:
            raise trio.BrokenResourceError(f"the other host is connected and has sent nothing for {seconds:g} s")
        if not piece:
            raise trio.BrokenResourceError("closed by the other host")
        data += piece
    return bytes(data)


def pack_encoded(encoded: EncodedFiles) -> Message:
    """Return encoded files as a message: their tensors are a patch of their own."""
    tensors = [encoded.tensors[name] for name in sorted(encoded.tensors)]
    no_digest = bytes(_DIGEST_BYTES)
    patch = write_container("fast", no_digest, no_digest, [t.row for t in tensors], [t.frame for t in tensors])
    digests = b"".join(tensor.before + tensor.after for tensor in tensors)
    shapes = tuple((t.row.name, type_name(t.row.dtype), t.row.shape) for t in tensors)
    return (
        encoded.files,
        encoded.encode_seconds,
        encoded.apply_seconds,
        shapes,
        digests,
        blake3(patch).digest(),
    ), patch


def unpack_encoded(message: Message) -> EncodedFiles:
    """Return the encoded files of a message; PatchError if its bytes are not those that were packed."""
    (files, encode_seconds, apply_seconds, shapes, digests, digest), patch = message
    if blake3(patch).digest() != digest:
        raise PatchError("the answer of another host has changed on its way", "frames")
    header, tensors, size = read_header(patch), dict[str, EncodedTensor](), 2 * _DIGEST_BYTES
    weights = outline({name: (dtypes[dtype], shape) for name, dtype, shape in shapes})
    pairs = {name: digests[place * size : (place + 1) * size] for place, name in enumerate(sorted(weights))}
    for unit, frame in split_frames(patch, header, header.table.units(weights)):
        for row in unit:
            own = memoryview(b"") if row.host else frame
            tensors[row.name] = EncodedTensor(
                row, own, pairs[row.name][:_DIGEST_BYTES], pairs[row.name][_DIGEST_BYTES:]
            )
    return EncodedFiles(tensors, files, encode_seconds, apply_seconds)


class OtherHost(HostFiles):
    """The files of another host, as host 0 sees them: what it asks waits until that host answers."""

    def __init__(self, node: Node, number: int, profile: str = "compact") -> None:
        super().__init__(node, node.key.public, profile)
        self._name = f"host {number}"
        self._streams: list[trio.abc.Stream | None] = [None] * _LANES
        self._locks = [trio.Lock() for _ in range(_LANES)]
        self._process = b""  # random bytes of the one that is asked
        self._replaced = set[bytes]()  # the processes before it
        self.refusals = ChangeReporter(node.telemetry, "host-refused", max_reports=100)  # of who connects

    async def encode(self, version: int, base: Base | None) -> EncodedFiles:
        own = base and (base.version, base.files, _pack(base.anchor), tuple(base.needed_versions))
        answer = await self._ask("encode", version, own)
        encoded: EncodedFiles = await self._node.run_sync(unpack_encoded, answer)
        return encoded

    async def put_part(self, offset: int, ref: ObjectRef) -> bool:
        return bool((await self._ask("put_part", offset, _pack([ref])))[0])

    async def references(self, version: int) -> Mapping[int, ObjectRef]:
        (numbers, refs), _ = await self._ask("references", version)
        return dict(zip(numbers, _unpack(refs), strict=True))

    async def put_files(self, version: int, anchor: Sequence[ObjectRef]) -> Sequence[int]:
        numbers: Sequence[int] = (await self._ask("put_files", version, _pack(anchor), lane=1))[0]
        return numbers

    async def _ask(self, *call: Any, lane: int = 0) -> Message:
        cause: BaseException | str = "no connection"
        with WaitReporter(self._node.telemetry, "host-missing") as reporter:
            async with self._locks[lane]:
                while True:
                    if (stream := self._streams[lane]) is None:
                        reporter.waiting(self._name, cause, "its upload process runs and reaches this host")
                        await trio.sleep(_POLL_SECONDS)
                        continue
                    try:
                        await _send(stream, call)
                        while (answer := await _receive(stream))[0] is None:
                            pass  # it works on it
                        value, data = answer
                    except (*_BROKEN, trio.Cancelled) as error:
                        # What was asked may be answered later, and must not be taken for the next answer.
                        self._streams[lane] = None if self._streams[lane] is stream else self._streams[lane]
                        if isinstance(error, trio.Cancelled):
                            raise
                        cause = error
                        continue
                    if isinstance(value, str):
                        raise PatchError(value, self._name)
                    return value, data

    async def ask_by(self, lane: int, stream: trio.abc.Stream, process: bytes) -> None:
        """Ask by this connection until it breaks or is replaced; refuse it if another process has connected since."""
        # Which process is the newer one is not read from clocks: that of a host that has just started may be wrong.
        if process != self._process and process not in self._replaced:
            self._replaced.add(self._process)
            replaced, self._streams, self._process = self._streams, [None] * _LANES, process
            for old in filter(None, replaced):
                await trio.aclose_forcefully(old)
        if process != self._process:
            await _send(stream, None)
            return
        await _send(stream, (self._key, self._profile))
        before, self._streams[lane] = self._streams[lane], stream
        if before is not None:
            await trio.aclose_forcefully(before)
        while self._streams[lane] is stream:
            await trio.sleep(_POLL_SECONDS)


async def accept_host(node: Node, others: Sequence[OtherHost], stream: trio.abc.Stream) -> None:
    """Take over a connection of another host until it breaks; one of another run, or of no host, is closed."""
    with suppress(*_BROKEN, TypeError, ValueError):  # whoever connects may send anything
        async with stream:
            (run_id, number, lane, process), _ = await _receive(stream, _GREETING_BYTES)
            if run_id != node.run_id or not (0 < number <= len(others) and 0 <= lane < _LANES):
                others[0].refusals.failure(MalformedError("of another run, or with a wrong number", f"host {number}"))
                return
            await others[number - 1].ask_by(lane, stream, process)


async def listen_for_hosts(node: Node, others: Sequence[OtherHost], meeting: str) -> None:
    """Take over the connections of other hosts for ever."""
    address, port = _place(meeting)

    async def accept(stream: trio.SocketStream) -> None:
        await accept_host(node, others, _watched(stream))

    try:
        listeners = await trio.open_tcp_listeners(port, host=address)
    except OSError as error:
        raise LostRankError(f"trainer.hosts: host 0 cannot listen at port {port} of {meeting}: {error}") from error
    await trio.serve_listeners(accept, listeners)


async def follow_host_0(node: Node, number: int, meeting: str, threads: int) -> None:
    """Do for ever what host 0 asks of this host's upload process; UserError if it asks one that connected later."""
    process = secrets.token_bytes(8)

    async def keep_connected(lane: int) -> None:
        with WaitReporter(node.telemetry, "host-missing") as reporter:
            while True:
                try:
                    stream = _watched(await trio.open_tcp_stream(*_place(meeting)))
                    await answer_host_0(stream, node, number, lane, threads, process, reporter.over)
                except (OSError, *_BROKEN) as error:
                    reporter.waiting("host 0", error, "its upload process runs and can be reached")
                await trio.sleep(_POLL_SECONDS)

    async with trio.open_nursery() as nursery:
        for lane in range(_LANES):
            nursery.start_soon(keep_connected, lane)


async def answer_host_0(
    stream: trio.abc.Stream,
    node: Node,
    number: int,
    lane: int,
    threads: int,
    process: bytes = b"",
    accepted: Callable[[], None] = lambda: None,
) -> None:
    """Answer host 0 until the connection breaks; call `accepted` when host 0 has accepted it."""
    async with stream:
        await _send(stream, (node.run_id, number, lane, process))
        greeting, _ = await _receive(stream)
        if greeting is None:
            text = f"another upload process with the number {number} has connected since"
            raise UserError(f"trainer.hosts: {text}; end it, or give each host a number of its own")
        key, profile = greeting
        accepted()
        files = HostFiles(node, key, profile, threads)
        while True:
            call, _ = await _receive(stream, seconds=math.inf)
            async with first_failure(*_BROKEN) as tasks:
                tasks.start_soon(_beat, stream)
                answer = await _answer(node.run_sync, files, *call)
                tasks.cancel_scope.cancel()
            if call[0].startswith("put"):
                node.telemetry.event("uploaded", call=call[0], answer=str(answer[0]))
            await _send(stream, *answer)


async def _beat(stream: trio.abc.SendStream) -> None:
    """Tell host 0 for ever that this process works on the answer."""
    while True:
        await trio.sleep(_BEAT_SECONDS)
        with trio.CancelScope(shield=True):  # a part of a message would garble the next
            await _send(stream, None)


async def _answer(run_sync: RunSync, files: HostFiles, *call: Any) -> Message:
    match call:
        case "encode", version, base:
            try:
                own = Base(base[0], base[1], _unpack(base[2]), base[3]) if base else None
                packed: Message = await run_sync(pack_encoded, await files.encode(version, own))
                return packed
            except PatchError as error:
                return str(error), b""
        case "put_part", offset, refs:
            return await files.put_part(offset, *_unpack(refs)), b""
        case "put_files", version, refs:
            return tuple(await files.put_files(version, _unpack(refs))), b""
        case "references", version:
            refs = await files.references(version)
            return (tuple(refs), _pack([*refs.values()])), b""
    raise MalformedError("an unknown question", str(call[0]))


def _pack(refs: Sequence[ObjectRef]) -> tuple[tuple[bytes, int], ...]:
    return tuple((ref.digest, ref.size) for ref in refs)


def _unpack(refs: Sequence[tuple[bytes, int]]) -> tuple[ObjectRef, ...]:
    return tuple(ObjectRef(digest=digest, size=size) for digest, size in refs)


def _place(meeting: str) -> tuple[bytes, int]:
    address, _, port = meeting.rpartition(":")
    return address.encode(), int(port) + 1  # for a str, Python imports a codec on the event loop


def _watched(stream: trio.SocketStream) -> trio.SocketStream:
    """Return a connection of which the kernel notices that the link is cut."""
    for name, value in (("KEEPIDLE", 10), ("KEEPINTVL", 5), ("KEEPCNT", 4), ("USER_TIMEOUT", _SILENT_SECONDS * 1000)):
        stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return stream
