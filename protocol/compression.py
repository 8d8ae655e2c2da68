"""zstd with a limit on the decompressed size (docs/spec/rollout.md).

zstandard ignores `max_output_size` for a frame that declares its size, so the declared size is read and checked first.
The content is then decompressed in one step into a buffer of that size. A stream would grow with whatever the blocks
contain (4 bytes can make 128 KiB) and compare the sizes only after the last block.
"""

import zstandard

from protocol import limits
from protocol.errors import LimitError, MalformedError


def compress(data: bytes, level: int = 3) -> bytes:
    """Return one zstd frame that declares its content's size."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def decompress(frame: bytes | bytearray | memoryview, max_bytes: int) -> bytes:
    """Return the content of one zstd frame; LimitError if it declares more than `max_bytes`, MalformedError if the
    bytes are not exactly one complete frame with a declared size and no dictionary.
    """
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            raise MalformedError("a zstd frame that does not declare its size")
        if header.content_size > max_bytes:
            raise LimitError(f"{header.content_size} bytes declared where at most {max_bytes} are allowed")
        if header.window_size == 0 and header.content_size > 0:
            raise MalformedError("a skippable frame")
        engine = zstandard.ZstdDecompressor(max_window_size=limits.MAX_ZSTD_WINDOW_BYTES)
        data = engine.decompress(frame, max_output_size=1, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedError("not one complete zstd frame") from error
    if len(data) != header.content_size:
        raise MalformedError("not the size that the zstd frame declares")
    return data
