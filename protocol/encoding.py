"""Canonical msgpack, and records: signed or hashed objects as frozen dataclass-like models (docs/spec/encoding.md).

One value has one encoding: shortest integers, map keys sorted by code point, floats as finite float64, no extension types.
Decoding checks the size before anything else, decodes within explicit limits, and then encodes again: bytes that differ
are not canonical and are refused, so a digest or a signature speaks of one value only.
"""

from typing import Any, ClassVar, Self

import msgpack
from pydantic import BaseModel, ConfigDict, ValidationError

from protocol import limits
from protocol.errors import LimitError, MalformedError

Value = None | bool | int | float | str | bytes | tuple["Value", ...] | dict[str, "Value"]
"""What canonical msgpack can say; arrays are tuples."""


def _sorted_maps(value: Any, depth: int) -> Any:
    if depth > limits.MAX_DEPTH:
        raise LimitError(f"nested deeper than {limits.MAX_DEPTH}")
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise MalformedError("a map key that is not a string")
        return {key: _sorted_maps(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, tuple | list):
        return [_sorted_maps(item, depth + 1) for item in value]
    if isinstance(value, float) and value - value != 0.0:
        raise MalformedError("a float that is not finite")
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise MalformedError(f"{type(value).__name__} has no canonical encoding")


def pack(value: Any) -> bytes:
    """The canonical encoding of a value.

    Raises:
        MalformedError: the value has none (a type, a key or a float outside the format).
        LimitError: nested too deep.
    """
    try:
        packed = msgpack.packb(_sorted_maps(value, 0), use_bin_type=True)
    except (ValueError, OverflowError, UnicodeEncodeError) as error:
        raise MalformedError(f"no canonical encoding: {error}") from error
    assert isinstance(packed, bytes)
    return packed


def unpack(data: bytes, max_bytes: int = limits.MAX_RECORD_BYTES) -> Any:
    """The value of canonical bytes; arrays come back as tuples.

    Raises:
        LimitError: more than `max_bytes`, too many items, or nested too deep.
        MalformedError: not msgpack, or not its canonical form.
    """
    if len(data) > max_bytes:
        raise LimitError(f"{len(data)} bytes where at most {max_bytes} are allowed")
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=min(len(data), limits.MAX_ITEMS),
            max_map_len=min(len(data), limits.MAX_ITEMS),
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError, OverflowError) as error:
        raise MalformedError(f"not msgpack: {str(error) or type(error).__name__}") from error
    if pack(value) != data:
        raise MalformedError("not the canonical encoding")
    return value


class Record(BaseModel):
    """A typed object of the protocol. Fields are strict and complete; unknown fields are refused.

    `kind` names the type in signatures (domain separation) and `max_bytes` caps its encoding.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=False)

    kind: ClassVar[str]
    max_bytes: ClassVar[int] = limits.MAX_RECORD_BYTES

    def to_bytes(self) -> bytes:
        """The canonical encoding of this record."""
        return pack(self.model_dump(mode="python"))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a record.

        Raises:
            LimitError: larger than this kind may be.
            MalformedError: not canonical, or a field that is missing, unknown, of the wrong type or out of range.
        """
        value = unpack(data, cls.max_bytes)
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise MalformedError(first["msg"].lower(), f"{cls.kind}.{place}" if place else cls.kind) from error
