"""Measure what envelopes and the list of names cost: `python -m bench.state_cost --mib 1024`.

One large object is written and read, and small ones are written and deleted, with the store of a node's state and with
the local store without envelopes, each in a process of its own. It takes about a minute and needs a disk with room for
the large object twice.
"""

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import trio

from grailnode.store.local import LocalStore
from grailnode.store.state.state_store import StateStore
from roles.ports import ObjectStore

_STORES: Final[dict[str, Callable[[Path], ObjectStore]]] = {
    "without envelopes": LocalStore,
    "state": lambda root: StateStore(root, bytes(32)),
}
_LARGE: Final = "checkpoints/large"
_SMALL_BYTES: Final = 600
_SMALL_OBJECTS: Final = 300


async def _seconds(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def _measure(store: ObjectStore, mib: int) -> str:
    data = os.urandom(1 << 20) * mib
    paths = [f"inbox/{number}" for number in range(_SMALL_OBJECTS)]

    async def put_all() -> None:
        for path in paths:
            await store.put(path, bytes(_SMALL_BYTES))

    async def delete_all() -> None:
        for path in paths:
            await store.delete(path)

    put = await _seconds(lambda: store.put(_LARGE, data))
    get = await _seconds(lambda: store.get(_LARGE, len(data)))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    small_put, small_delete = await _seconds(put_all), await _seconds(delete_all)
    return (
        f"put {put:.2f} s, get {get:.2f} s, peak {memory} MiB; small objects: put "
        f"{1000 * small_put / len(paths):.1f} ms, delete {1000 * small_delete / len(paths):.1f} ms"
    )


def _run(name: str, directory: str, mib: int) -> None:
    print(f"{name}: {trio.run(_measure, _STORES[name](Path(directory) / name), mib)}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the large object")
    parser.add_argument("--rounds", type=int, default=2, help="how often each store is measured, in turn")
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk to measure")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for _ in range(options.rounds):
        for name in _STORES:
            with tempfile.TemporaryDirectory(dir=options.dir) as directory:
                process = context.Process(target=_run, args=(name, directory, options.mib))
                process.start()
                process.join()


if __name__ == "__main__":
    main()
