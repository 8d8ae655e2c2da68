"""Canonical msgpack, and records: signed or hashed objects as frozen dataclass-like models (docs/spec/encoding.md).

One value has one encoding: shortest integers, map keys sorted by code point, floats as finite float64, no extension
types. Decoding checks the size; walks the bytes and counts values, depth and lengths before it builds anything;
decodes; and encodes the result again. Bytes that differ from this encoding are refused, so a digest or a signature
identifies one value only.
"""

import hashlib
from collections.abc import Iterable
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Final, Self

import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from protocol import limits
from protocol.errors import LimitError, MalformedError

Value = None | bool | int | float | str | bytes | tuple["Value", ...] | dict[str, "Value"]
"""A value that has a canonical encoding; arrays are tuples."""

Line = Annotated[str, Field(pattern=r"^\P{C}*$")]
"""Text that is shown to people. It has no control characters, which a terminal would execute, and no other invisible
characters.
"""

Window = Annotated[int, Field(ge=0, lt=1 << 33)]
"""The number of a window."""

Version = Annotated[int, Field(ge=0, lt=1 << 33)]
"""The number of a policy version."""


REWARD_UNIT: Final = 1_000_000

Reward = Annotated[int, Field(ge=-limits.MAX_REWARD, le=limits.MAX_REWARD)]
"""A reward in millionths."""


def content_digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the SHA-256 of a file's bytes (32 bytes), which is the file's name."""
    return hashlib.sha256(data).digest()


def _check_ascending(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(value >= following for value, following in pairwise(values)):
        raise ValueError("items that do not strictly ascend")
    return values


Ascending: Final = AfterValidator(_check_ascending)
"""Refuses a tuple whose items do not strictly ascend."""


def ascending_by(field: str) -> AfterValidator:
    """Return what refuses a tuple of records that do not strictly ascend by a field, or by a field of a field."""
    key = attrgetter(field)
    return AfterValidator(lambda items: (_check_ascending(tuple(map(key, items))), items)[1])


def one_of(values: Iterable[str]) -> AfterValidator:
    """Return what refuses a text that is none of some values."""
    known = frozenset(map(str, values))

    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"none of the known ones: {value!r}")
        return value

    return AfterValidator(check)


OPTIONAL: Final[Any] = Field(default=None, exclude_if=lambda value: value is None)
"""The value of a field that is left out of the encoding where it is None."""

_FIXED_SIZES: Final = {  # first byte of a value whose size that byte determines: bytes of the value
    **dict.fromkeys(range(0x80), 1),  # small integers
    **dict.fromkeys(range(0xE0, 0x100), 1),
    **{0xA0 + size: 1 + size for size in range(32)},  # short strings
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 1),  # nil, false, true
    **{first: 1 + (1 << i) for i in range(4) for first in (0xCC + i, 0xD0 + i)},  # integers
    0xCB: 9,  # float64
}
_BYTES, _STRING, _ARRAY, _MAP = range(4)
_SIZE_FIELDS: Final = {  # first byte of a value whose size follows: (bytes of the size field, kind of value)
    **{first + i: (1 << i, kind) for i in range(3) for first, kind in ((0xC4, _BYTES), (0xD9, _STRING))},
    **{first + i: (2 << i, kind) for i in range(2) for first, kind in ((0xDC, _ARRAY), (0xDE, _MAP))},
}


def _read_size(data: bytes, offset: int) -> tuple[int, int]:
    """Read the size of the value at `offset`, which is no value of a fixed size; return the offset of the next value to
    read (a container's first item, or else the value behind this one), and the number of the container's items, -1 for
    a string or bytes.
    """
    first = data[offset]
    if 0x80 <= first <= 0x9F:
        return offset + 1, (first & 0x0F) * (2 if first < 0x90 else 1)
    if first not in _SIZE_FIELDS:
        raise MalformedError("an extension type or a float32", f"byte {offset}")
    width, kind = _SIZE_FIELDS[first]
    begin = offset + 1 + width
    size = int.from_bytes(data[offset + 1 : begin], "big")
    if kind == _STRING and size > limits.MAX_STRING_BYTES:
        raise LimitError(f"a string of {size} bytes", f"byte {offset}")
    if kind in (_BYTES, _STRING):
        return begin + size, -1
    return begin, size * (2 if kind == _MAP else 1)


def _check_structure(data: bytes, max_items: int) -> None:
    """Walk the bytes of one value without building it, since one byte of msgpack can become a hundred of Python's."""
    outer: list[int] = []  # for each open container, the values that follow it in the container around it
    remaining, offset, items, end = 1, 0, 1, len(data)
    while remaining or outer:
        if remaining == 0:
            remaining = outer.pop()
            continue
        if offset >= end:
            raise MalformedError("cut off", f"byte {end}")
        remaining -= 1
        size = _FIXED_SIZES.get(data[offset])
        if size is not None:
            offset += size
            continue
        offset, inside = _read_size(data, offset)
        if inside >= 0:
            items += inside
            outer.append(remaining)
            remaining = inside
            if items > max_items:
                raise LimitError(f"more than {max_items} values")
            if len(outer) > limits.MAX_DEPTH:
                raise LimitError(f"nested deeper than {limits.MAX_DEPTH}")
    if offset != end:
        raise MalformedError("cut off, or bytes behind the value", f"byte {min(offset, end)}")


_PLAIN: Final = frozenset((int, bool, bytes, type(None)))  # types whose values need no check
_SHORT: Final = limits.MAX_STRING_BYTES // 4  # characters that are within the limit in every script


def _sorted_maps(value: Any, depth: int) -> Any:
    if type(value) in _PLAIN or (type(value) is str and len(value) <= _SHORT):
        return value
    if isinstance(value, (dict, tuple, list)):  # of a union it takes twice as long
        if depth == limits.MAX_DEPTH:
            raise LimitError(f"nested deeper than {limits.MAX_DEPTH}")
        if not isinstance(value, dict):
            return (
                value
                if _PLAIN.issuperset(map(type, value))
                else [
                    item
                    if type(item) in _PLAIN or (type(item) is str and len(item) <= _SHORT)
                    else _sorted_maps(item, depth + 1)
                    for item in value
                ]
            )
        for key in value:
            if not isinstance(key, str):
                raise MalformedError("a map key that is not a string")
            if len(key) > _SHORT:
                _sorted_maps(key, depth)
        return {key: _sorted_maps(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, float) and value - value != 0.0:
        raise MalformedError("a float that is not finite")
    if isinstance(value, str) and len(value.encode()) > limits.MAX_STRING_BYTES:
        raise LimitError(f"a string longer than {limits.MAX_STRING_BYTES} bytes")
    if isinstance(value, int | float | str | bytes):
        return value
    raise MalformedError(f"{type(value).__name__} has no canonical encoding")


def pack(value: Any) -> bytes:
    """Return the canonical encoding of a value; MalformedError if a type, a key, an integer or a float has none,
    LimitError if it is nested too deeply or a string is too long.
    """
    try:
        packed = msgpack.packb(_sorted_maps(value, 0), use_bin_type=True)
    except (ValueError, OverflowError) as error:
        raise MalformedError(f"no canonical encoding: {error}") from error
    assert isinstance(packed, bytes)
    return packed


def _unpack(data: bytes, max_bytes: int, max_items: int) -> Any:
    """Decode a value without checking that its encoding is canonical."""
    if len(data) > max_bytes:
        raise LimitError(f"{len(data)} bytes where at most {max_bytes} are allowed")
    _check_structure(data, max_items)
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
    """Decode canonical bytes; arrays become tuples. LimitError for more than `max_bytes` or `max_items`, too long a
    string, or too deep a value; MalformedError for bytes that are not msgpack, or not in its canonical form.
    """
    value = _unpack(data, max_bytes, max_items)
    if pack(value) != data:
        raise MalformedError("not the canonical encoding")
    return value


class Record(BaseModel):
    """A typed object of the protocol. Types are strict, all fields are required, and unknown fields are refused.

    `kind` names the type in signatures (domain separation); `max_bytes` and `max_items` limit its encoding.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=False)

    kind: ClassVar[str]
    max_bytes: ClassVar[int] = limits.MAX_RECORD_BYTES
    max_items: ClassVar[int] = limits.MAX_ITEMS

    def to_bytes(self) -> bytes:
        """Return the canonical encoding of this record; LimitError if it is larger than any reader accepts."""
        data = pack(self.model_dump(mode="python"))
        if len(data) > self.max_bytes:
            raise LimitError(f"{len(data)} bytes where at most {self.max_bytes} are allowed", self.kind)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a record. LimitError if the bytes exceed a limit of this kind; MalformedError if the encoding is not
        canonical, or a field is missing, unknown, of the wrong type or out of range.
        """
        value = _unpack(data, cls.max_bytes, cls.max_items)
        try:
            record = cls.model_validate(value)
        except ValidationError as error:
            raise _malformed(cls.kind, error) from error
        # Compare with the record's encoding, not the value's: even when strict, pydantic accepts an integer as a float.
        if record.to_bytes() != data:
            raise MalformedError("not the canonical encoding", cls.kind)
        return record


def _malformed(kind: str, error: ValidationError) -> MalformedError:
    first = error.errors(include_url=False, include_input=False)[0]
    parts = [part if isinstance(part, int) or part.isidentifier() else ascii(part) for part in first["loc"]]
    return MalformedError(first["msg"].lower(), ".".join((kind, *(str(part)[:40] for part in parts))))
