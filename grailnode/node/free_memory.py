"""How much memory new programs can have, of the machine and of the cgroups that limit this process (containers)."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")


def free_memory() -> int:
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert available is not None  # Linux 3.14 and later
    return min(int(available[1]) << 10, *_cgroup_rooms(), 1 << 62)


def _cgroup_rooms() -> Iterator[int]:
    """Yield the bytes that this process's cgroup, and each one around it, leaves free; nothing where none limits."""
    own = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    directory = _CGROUPS / (own[1] if own else "")
    for cgroup in (directory, *directory.parents):
        if not cgroup.is_relative_to(_CGROUPS):
            return
        with suppress(OSError):  # a container sees only its own
            limit, used = ((cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current"))
            cache = re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.MULTILINE)
            if limit != "max":
                yield int(limit) - int(used) + (int(cache[1]) if cache else 0)
