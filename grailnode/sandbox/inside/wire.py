"""The messages between tester and solver: calls in one direction, plain values in the other, never objects.

A frame is 4 bytes of length (big-endian), one byte of kind, and JSON. A value is JSON's null, true, false or string, or
a list of a tag and contents. Values that arrive have built-in types only, so that a solution cannot redefine equality.
"""

import json
import os
import resource
from collections.abc import Callable
from typing import Any, Final

MAX_FRAME_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64
MAX_VALUES: Final = 100_000

HELLO: Final = b"h"
COMPILED: Final = b"c"
COMPILE_ERROR: Final = b"s"
LOADED: Final = b"l"
CALL: Final = b"k"
VALUE: Final = b"v"
RAISED: Final = b"e"


class GoneError(BaseException):
    """The other side has ended, or sent something that is not a frame. A BaseException, so that no test catches it."""


class UnsendableError(TypeError):
    """A value is not plain, or too large."""


def limit(cpu_seconds: int, memory_bytes: int, file_bytes: int, files: int, processes: int = 0) -> None:
    """Set the resource limits of this process irrevocably, before it reads anything foreign."""
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_STACK, 8 << 20),
    ):
        hard_limit = resource.getrlimit(kind)[1]
        new_limit = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
        resource.setrlimit(kind, (new_limit, new_limit))


def send(channel: int, kind: bytes, value: object = None) -> None:
    """Write a frame; raise UnsendableError or GoneError."""
    payload = json.dumps(_Packer().pack(value, 0)).encode()
    if len(payload) >= MAX_FRAME_BYTES:
        raise UnsendableError("too large")
    write(channel, (len(payload) + 1).to_bytes(4, "big") + kind + payload)


def write(channel: int, data: bytes) -> None:
    """Write bytes to a channel; raise GoneError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(channel, view) :]
        except OSError as error:
            raise GoneError from error


def receive(channel: int) -> tuple[bytes, Any]:
    """Read a frame, and return its kind and its value; raise GoneError."""
    size = int.from_bytes(read(channel, 4), "big")
    if not 1 <= size <= MAX_FRAME_BYTES:
        raise GoneError
    frame = read(channel, size)
    try:
        return frame[:1], _unpack(json.loads(frame[1:]))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise GoneError from error


def read(channel: int, size: int) -> bytes:
    """Return the next bytes of a channel; raise GoneError."""
    data = bytearray()
    while len(data) < size:
        try:
            piece = os.read(channel, size - len(data))
        except OSError as error:
            raise GoneError from error
        if not piece:
            raise GoneError
        data += piece
    return bytes(data)


class _Packer:
    """Converts one plain value to JSON. Integers are hexadecimal, because Python limits the digits of decimal ones."""

    def __init__(self) -> None:
        self._remaining_values = MAX_VALUES

    def pack(self, value: object, depth: int) -> object:
        self._remaining_values -= 1
        if depth > MAX_DEPTH or self._remaining_values < 0:
            raise UnsendableError("too deep or too many values")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        return self._pack_number(value) or self._pack_container(value, depth)

    @staticmethod
    def _pack_number(value: object) -> list[object]:
        if isinstance(value, int):
            return ["i", f"{int.__index__(value):x}"]
        if isinstance(value, float):
            return ["f", float.hex(value)]
        if isinstance(value, complex):
            return ["c", float.hex(value.real), float.hex(value.imag)]
        if isinstance(value, bytes | bytearray):
            return ["b", value.hex()]
        return []

    def _pack_container(self, value: object, depth: int) -> list[object]:
        for tag, kind in (("l", list), ("t", tuple), ("s", set), ("z", frozenset)):
            if isinstance(value, kind):
                return [tag, *(self.pack(item, depth + 1) for item in value)]
        if isinstance(value, dict):
            return ["d", *(self.pack(part, depth + 1) for pair in value.items() for part in pair)]
        if isinstance(value, range):
            return ["r", *(f"{part:x}" for part in (value.start, value.stop, value.step))]
        raise UnsendableError(f"{type(value).__name__} is not plain")


_SCALARS: Final[dict[str, Callable[..., Any]]] = {
    "i": lambda digits: int(digits, 16),
    "f": float.fromhex,
    "c": lambda real, imaginary: complex(float.fromhex(real), float.fromhex(imaginary)),
    "b": bytes.fromhex,
    "r": lambda *parts: range(*(int(part, 16) for part in parts)),
}
_CONTAINERS: Final[dict[str, Callable[..., Any]]] = {
    "l": list,
    "t": tuple,
    "s": set,
    "z": frozenset,
    "d": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
}


def _unpack(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    tag, *parts = value
    if tag in _SCALARS:
        return _SCALARS[tag](*parts)
    return _CONTAINERS[tag]([_unpack(part) for part in parts])
