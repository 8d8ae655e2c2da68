"""The objects in a store: their paths, and copies of them."""

from typing import TypeVar

from roles.ports import ObjectStore

Copy = TypeVar("Copy", bound=ObjectStore)


async def paths(store: ObjectStore, prefix: str = "", after: str = "") -> list[str]:
    """Return the paths below a prefix and behind `after`, in the order of the listing."""
    return [info.path async for info in store.list(prefix, after=after)]


async def names_below(store: ObjectStore, prefix: str) -> list[str]:
    """Return the paths below a prefix, without the prefix."""
    return [path.removeprefix(prefix) for path in await paths(store, prefix)]


async def copy_objects(store: ObjectStore, copy: Copy, *, without: str | None = None) -> Copy:
    """Copy all objects of a store into another one, but those below a prefix; return the other one."""
    for path in await paths(store):
        if without is None or not path.startswith(without):
            await copy.put(path, await store.get(path, 1 << 30))
    return copy
