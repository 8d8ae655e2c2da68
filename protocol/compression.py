"""zstd with a ceiling. A frame that declares its size ignores zstandard's `max_output_size`, so the declared size is read
first, checked, and then compared with what came out."""

import zstandard

from protocol.errors import LimitError, MalformedError


def compress(data: bytes, level: int = 3) -> bytes:
    """One zstd frame that declares its content's size."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def decompress(frame: bytes, max_bytes: int) -> bytes:
    """The content of one zstd frame.

    Raises:
        LimitError: it declares more than `max_bytes`.
        MalformedError: not exactly one complete frame with a declared size and no dictionary.
    """
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            raise MalformedError("a zstd frame that does not declare its size")
        if header.content_size > max_bytes:
            raise LimitError(f"{header.content_size} bytes declared where at most {max_bytes} are allowed")
        engine = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        data = engine.decompress(frame)
    except zstandard.ZstdError as error:
        raise MalformedError("not a zstd frame") from error
    if not engine.eof or engine.unused_data or len(data) != header.content_size:
        raise MalformedError("not one complete zstd frame")
    return data
