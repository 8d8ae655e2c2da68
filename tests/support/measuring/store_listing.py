"""The paths of the objects in a store."""

from roles.ports import ObjectStore


async def paths(store: ObjectStore, prefix: str, after: str = "") -> list[str]:
    """Return the paths below a prefix and behind `after`, in the order of the listing."""
    return [info.path async for info in store.list(prefix, after=after)]
