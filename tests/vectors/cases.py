"""The cases of the golden vectors (see build.py)."""

import struct
from typing import Any

Case = dict[str, Any]
MALFORMED, LIMIT, SIGNATURE = "MalformedError", "LimitError", "SignatureError"


def good(name: str, parser: str, data: bytes, **more: Any) -> Case:
    """Build a case of bytes that a parser accepts."""
    return {"name": name, "parser": parser, "data": data.hex(), **more}


def bad(name: str, parser: str, data: bytes, error: str) -> Case:
    """Build a case of bytes that a parser refuses with an error."""
    return {"name": name, "parser": parser, "data": data.hex(), "error": error}


def uncompressed_frame(data: bytes, declared: int | None = None) -> bytes:
    """Build a zstd frame of one block that is not compressed, so that every library gives the same bytes."""
    size = struct.pack("<I", len(data) if declared is None else declared)
    return struct.pack("<I", 0xFD2FB528) + b"\xa0" + size + ((len(data) << 3) | 1).to_bytes(3, "little") + data
