"""How this process's allocator treats large blocks of memory."""

import ctypes
from typing import Final

_M_MMAP_THRESHOLD: Final = -3  # of malloc.h


def return_large_blocks(limit: int) -> None:
    """Have malloc give each block of `limit` bytes or more back to the kernel when it is freed.

    By itself glibc raises this limit up to 32 MiB, by the blocks that are freed. Then what a step or the writing of a
    file needed for a moment stays with the process, in pieces that do not fit the next need: 2 to 6 bytes for each
    weight of 75 million (docs/adr/0410). With another allocator than glibc's, nothing changes.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, limit)
