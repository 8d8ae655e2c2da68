"""Ranges of bytes of an object, as `ObjectStore.get` takes them."""

from roles.ports import TooLargeError


def check_range(max_bytes: int, offset: int, size: int | None) -> None:
    """Check the arguments of `ObjectStore.get`.

    Raises:
        ValueError: one of them is negative.
    """
    if max_bytes < 0 or offset < 0 or (size is not None and size < 0):
        raise ValueError(f"a range of bytes cannot be negative: {max_bytes=} {offset=} {size=}")


def slice_object(data: bytes, path: str, max_bytes: int, offset: int, size: int | None) -> bytes:
    """Return a range of a whole object, as `ObjectStore.get` would.

    Raises:
        TooLargeError: the range has more than `max_bytes`.
    """
    end = len(data) if size is None else min(len(data), offset + size)
    if end - offset > max_bytes:
        raise TooLargeError(f"{path}: {end - offset} bytes where at most {max_bytes} are allowed")
    return data[offset:end]
