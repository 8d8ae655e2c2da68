"""Which paths a store accepts. Every implementation has the same rule, so that objects can move between stores.

Paths come from protocol/paths.py, never from a peer. An invalid path is therefore a bug: a ValueError.
"""

from protocol import limits


def check_path(path: str) -> str:
    """Return the path if it is the path of an object.

    Single slashes separate its parts. No part begins with '.', so that there is neither '.' nor '..', and no path
    leads to the local store's own files.

    Raises:
        ValueError: the path is empty, absolute or too long; a part is empty, too long or begins with '.'; or a
            character is not printable or is a backslash.
    """
    if not is_path(path):
        raise ValueError(f"not an object path: {path[:200]!r}")
    return path


def is_path(path: str) -> bool:
    """Return whether a path is the path of an object. Listings leave out every other path."""
    if not path.isprintable() or "\\" in path or len(path.encode()) > limits.MAX_OBJECT_PATH_BYTES:
        return False
    return all(_is_part(part) for part in path.split("/"))


def _is_part(part: str) -> bool:
    return bool(part) and not part.startswith(".") and len(part.encode()) <= limits.MAX_OBJECT_PART_BYTES


def check_prefix(prefix: str) -> str:
    """Return the prefix if a path can begin with it: '' for all paths, 'folder/' for those of one folder.

    Raises:
        ValueError: no path can begin with it.
    """
    if prefix and not is_path(prefix + "x"):
        raise ValueError(f"not a prefix of object paths: {prefix!r}")
    return prefix
