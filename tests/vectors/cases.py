"""Cases of the golden vectors: what a page is a list of (see build.py)."""

import struct
from typing import Any

Case = dict[str, Any]
MALFORMED, LIMIT, SIGNATURE = "MalformedError", "LimitError", "SignatureError"


def good(name: str, parser: str, data: bytes, **more: Any) -> Case:
    return {"name": name, "parser": parser, "data": data.hex(), **more}


def bad(name: str, parser: str, data: bytes, error: str) -> Case:
    return {"name": name, "parser": parser, "data": data.hex(), "error": error}


def stored_frame(data: bytes, declared: int | None = None) -> bytes:
    """A zstd frame of one block that is not compressed: the same bytes from every library."""
    size = struct.pack("<I", len(data) if declared is None else declared)
    return struct.pack("<I", 0xFD2FB528) + b"\xa0" + size + ((len(data) << 3) | 1).to_bytes(3, "little") + data
