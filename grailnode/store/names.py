"""Which paths a store takes: one rule for every implementation, so that what one stores any other can hold.

Paths come from protocol/paths.py, never from a peer, so a bad one is our own fault: a ValueError.
"""

from protocol import limits


def check_path(path: str) -> str:
    """The path, if an object may lie there.

    Parts are divided by single slashes; none begins with '.', which leaves no '.', no '..' and no way to reach
    a file that the local store keeps for itself.

    Raises:
        ValueError: empty, absolute, too long, a part that is empty, too long or begins with '.', or a character
            that is not printable or is a backslash.
    """
    if not is_path(path):
        raise ValueError(f"not an object path: {path[:200]!r}")
    return path


def is_path(path: str) -> bool:
    """Whether an object may lie there; a store's listing leaves out what could not have been put."""
    if not path.isprintable() or "\\" in path or len(path.encode()) > limits.MAX_OBJECT_PATH_BYTES:
        return False
    return all(_is_part(part) for part in path.split("/"))


def _is_part(part: str) -> bool:
    return bool(part) and not part.startswith(".") and len(part.encode()) <= limits.MAX_OBJECT_PART_BYTES


def check_prefix(prefix: str) -> str:
    """The prefix, if paths can begin with it: all of them with '', those of one folder with 'folder/'.

    Raises:
        ValueError: no path could begin so.
    """
    if prefix and not is_path(prefix + "x"):
        raise ValueError(f"not a prefix of object paths: {prefix!r}")
    return prefix


def check_range(max_bytes: int, offset: int, size: int | None) -> None:
    """Refuse a range that no object has.

    Raises:
        ValueError: a negative number.
    """
    if max_bytes < 0 or offset < 0 or (size is not None and size < 0):
        raise ValueError(f"a range of bytes cannot be negative: {max_bytes=} {offset=} {size=}")
