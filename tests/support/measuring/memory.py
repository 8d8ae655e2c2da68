"""The peak of a function's additional memory, which the kernel measures in a forked child.

A child starts with the parent's memory as its resident set and its high-water mark. Free memory that the parent's
allocator holds would hide the memory of the function, so it is returned to the kernel first. Pages of program files,
which a child maps anew as it touches them, are not counted. Linux with glibc.
"""

import ctypes
import gc
import os
import struct
import traceback
from collections.abc import Callable

M_MMAP_THRESHOLD = -3  # of malloc.h
PR_SET_THP_DISABLE = 41  # of prctl.h


def peak_extra(work: Callable[[], object]) -> int:
    """Return the peak of resident bytes of `work` above those before it.

    What it raises is printed and becomes a RuntimeError.

    The work must make its own scratch memory, and must have run once before, or its imports and compiled kernels count
    too.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # What is freed returns to the kernel at once, whatever was allocated before, and a page has 4 KiB.
            libc.mallopt(M_MMAP_THRESHOLD, 128 << 10)
            libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
            earlier_resident, files = resident("VmRSS"), resident("RssFile")
            work()
            extra = resident("VmHWM") - earlier_resident - (resident("RssFile") - files)
            os.write(writer, struct.pack("<q", max(0, extra)))
            status = 0
        except BaseException:  # noqa: BLE001 - the child must end here, whatever happened
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if len(answer) != 8:
        raise RuntimeError("the work failed in the child that was to measure it")
    return int(struct.unpack("<q", answer)[0])


def resident(field: str) -> int:
    """Return a number of this process's memory in bytes: VmRSS is now, VmHWM the peak, RssFile that of mapped files."""
    with open("/proc/self/status") as status:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
