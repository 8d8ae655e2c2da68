"""Canonical msgpack, and records: signed or hashed objects as frozen dataclass-like models (docs/spec/encoding.md).

One value has one encoding: shortest integers, map keys sorted by code point, floats as finite float64, no extension types.
Decoding checks the size, then walks the bytes and counts (values, depth, lengths) before anything is built, decodes, and then
encodes again: bytes that differ are not canonical and are refused, so a digest or a signature speaks of one value only.
"""

from typing import Any, ClassVar, Final, Self

import msgpack
from pydantic import BaseModel, ConfigDict, ValidationError

from protocol import limits
from protocol.errors import LimitError, MalformedError

Value = None | bool | int | float | str | bytes | tuple["Value", ...] | dict[str, "Value"]
"""What canonical msgpack can say; arrays are tuples."""

_SIZED: Final = {  # first byte: (bytes of the length that follows, unit: 0 bytes, 1 string, 2 array, 3 map)
    **{0xC4 + i: (1 << i, 0) for i in range(3)},
    **{0xD9 + i: (1 << i, 1) for i in range(3)},
    **{0xDC + i: (2 << i, 2) for i in range(2)},
    **{0xDE + i: (2 << i, 3) for i in range(2)},
}
_SCALAR: Final = {  # first byte: bytes that follow
    **dict.fromkeys(range(0x80), 0),
    **dict.fromkeys(range(0xE0, 0x100), 0),
    0xC0: 0,
    0xC2: 0,
    0xC3: 0,
    0xCB: 8,
    **{0xCC + i: 1 << i for i in range(4)},
    **{0xD0 + i: 1 << i for i in range(4)},
}


def _head(data: bytes, place: int) -> tuple[int, int, int]:
    """The value that begins at `place`: where what follows its head begins, bytes to skip there, values inside (-1: none)."""
    first = data[place]
    place += 1
    if first in _SCALAR:
        return place, _SCALAR[first], -1
    if first in _SIZED:
        width, unit = _SIZED[first]
        size = int.from_bytes(data[place : place + width], "big")
        place += width
    elif first & 0xE0 == 0xA0:
        size, unit = first & 0x1F, 1
    elif first & 0xF0 == 0x90:
        size, unit = first & 0x0F, 2
    elif first & 0xF0 == 0x80:
        size, unit = first & 0x0F, 3
    else:
        raise MalformedError("an extension type or a float32", f"byte {place - 1}")
    if unit == 1 and size > limits.MAX_STRING_BYTES:
        raise LimitError(f"a string of {size} bytes", f"byte {place}")
    if unit >= 2:
        return place, 0, size * (unit - 1)
    return place, size, -1


def _survey(data: bytes, max_items: int) -> None:
    """Walk the bytes of one value without building it: a byte of msgpack can stand for a hundred bytes of Python objects.

    Raises:
        LimitError: more than `max_items` values, a longer string, or nested deeper than limits allow.
        MalformedError: cut off, bytes behind the value, or a type that is not canonical.
    """
    due = [1]  # values still to come in each open container
    place, items, end = 0, 0, len(data)
    while due:
        if due[-1] == 0:
            due.pop()
            continue
        due[-1] -= 1
        if place >= end:
            raise MalformedError("cut off", f"byte {end}")
        place, skip, inside = _head(data, place)
        place += skip
        items += 1 + max(0, inside) if len(due) == 1 else max(0, inside)
        if items > max_items:
            raise LimitError(f"more than {max_items} values")
        if inside >= 0:
            if len(due) > limits.MAX_DEPTH:
                raise LimitError(f"nested deeper than {limits.MAX_DEPTH}")
            due.append(inside)
    if place != end:
        raise MalformedError("cut off or bytes behind the value", f"byte {min(place, end)}")


def _sorted_maps(value: Any, depth: int) -> Any:
    if isinstance(value, dict | tuple | list):
        if depth == limits.MAX_DEPTH:
            raise LimitError(f"nested deeper than {limits.MAX_DEPTH}")
        if not isinstance(value, dict):
            return [_sorted_maps(item, depth + 1) for item in value]
        if not all(isinstance(key, str) for key in value):
            raise MalformedError("a map key that is not a string")
        return {_sorted_maps(key, depth): _sorted_maps(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, float) and value - value != 0.0:
        raise MalformedError("a float that is not finite")
    if isinstance(value, str) and len(value.encode()) > limits.MAX_STRING_BYTES:
        raise LimitError(f"a string longer than {limits.MAX_STRING_BYTES} bytes")
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise MalformedError(f"{type(value).__name__} has no canonical encoding")


def pack(value: Any) -> bytes:
    """The canonical encoding of a value.

    Raises:
        MalformedError: the value has none (a type, a key, an integer or a float outside the format).
        LimitError: nested too deep, or a string that is too long.
    """
    try:
        packed = msgpack.packb(_sorted_maps(value, 0), use_bin_type=True)
    except (ValueError, OverflowError) as error:
        raise MalformedError(f"no canonical encoding: {error}") from error
    assert isinstance(packed, bytes)
    return packed


def _unpack(data: bytes, max_bytes: int, max_items: int) -> Any:
    """A value whose canonical form is still to be checked."""
    if len(data) > max_bytes:
        raise LimitError(f"{len(data)} bytes where at most {max_bytes} are allowed")
    _survey(data, max_items)
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_str_len=limits.MAX_STRING_BYTES,
            max_bin_len=len(data),
            max_array_len=max_items,
            max_map_len=max_items,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise MalformedError(f"not msgpack: {str(error) or type(error).__name__}") from error


def unpack(data: bytes, max_bytes: int = limits.MAX_RECORD_BYTES, max_items: int = limits.MAX_ITEMS) -> Any:
    """The value of canonical bytes; arrays come back as tuples.

    Raises:
        LimitError: more than `max_bytes`, too many values, a string too long, or nested too deep.
        MalformedError: not msgpack, or not its canonical form.
    """
    value = _unpack(data, max_bytes, max_items)
    if pack(value) != data:
        raise MalformedError("not the canonical encoding")
    return value


class Record(BaseModel):
    """A typed object of the protocol. Fields are strict and complete; unknown fields are refused.

    `kind` names the type in signatures (domain separation); `max_bytes` and `max_items` cap its encoding.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=False)

    kind: ClassVar[str]
    max_bytes: ClassVar[int] = limits.MAX_RECORD_BYTES
    max_items: ClassVar[int] = limits.MAX_ITEMS

    def to_bytes(self) -> bytes:
        """The canonical encoding of this record.

        Raises:
            LimitError: larger than any reader accepts.
        """
        data = pack(self.model_dump(mode="python"))
        if len(data) > self.max_bytes:
            raise LimitError(f"{len(data)} bytes where at most {self.max_bytes} are allowed", self.kind)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a record.

        Raises:
            LimitError: larger than this kind may be.
            MalformedError: not canonical, or a field that is missing, unknown, of the wrong type or out of range.
        """
        value = _unpack(data, cls.max_bytes, cls.max_items)
        try:
            record = cls.model_validate(value)
        except ValidationError as error:
            raise _malformed(cls.kind, error) from error
        # The record's own encoding, not the value's: pydantic takes an integer for a float even when it is strict.
        if record.to_bytes() != data:
            raise MalformedError("not the canonical encoding", cls.kind)
        return record


def _malformed(kind: str, error: ValidationError) -> MalformedError:
    first = error.errors(include_url=False, include_input=False)[0]
    parts = [part if isinstance(part, int) or part.isidentifier() else ascii(part) for part in first["loc"]]
    return MalformedError(first["msg"].lower(), ".".join((kind, *(str(part)[:40] for part in parts))))
