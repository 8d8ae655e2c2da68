"""Random histories of operations: a store answers as a dictionary would."""

import tempfile
from pathlib import Path
from typing import Any

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from grailnode.store.local import LocalStore
from grailnode.store.memory import MemoryStore
from roles.ports import NotFoundError, ObjectStore
from tests.support.measuring.store_listing import paths

Step = tuple[Any, ...]

# file names begin with 'f' and folder names with 'd', so that no path is a folder of another
folders = st.lists(st.sampled_from(["d", "d-", "d.", "d0", "dé"]), max_size=3)
files = st.sampled_from(["f", "f-a", "f.a", "f0", "f😀", "fa"])
object_paths = st.tuples(folders, files).map(lambda parts: "/".join([*parts[0], parts[1]]))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), object_paths, st.binary(max_size=20)),
        st.tuples(st.just("delete"), object_paths),
        st.tuples(st.just("get"), object_paths, st.integers(0, 25), st.none() | st.integers(0, 25)),
        st.tuples(st.just("list"), object_paths.map(lambda path: path[: len(path) // 2]), object_paths | st.just("")),
    ),
    max_size=30,
)


async def replay(store: ObjectStore, history: list[Step]) -> None:
    model: dict[str, bytes] = {}
    for step in history:
        match step:
            case "put", path, data:
                await store.put(path, data)
                model[path] = data
            case "delete", path:
                await store.delete(path)
                model.pop(path, None)
            case "get", path, offset, size:
                try:
                    answer = await store.get(path, 100, offset=offset, size=size)
                except NotFoundError:
                    assert path not in model
                else:
                    assert answer == model[path][offset : None if size is None else offset + size]
            case "list", prefix, after:
                expected_paths = sorted(path for path in model if path.startswith(prefix) and path > after)
                assert await paths(store, prefix, after) == expected_paths


@given(steps)
def test_a_memory_store_answers_like_a_dictionary(history: list[Step]):
    trio.run(replay, MemoryStore(), history)


@settings(max_examples=40, deadline=None)
@given(steps)
def test_a_local_store_answers_like_a_dictionary(history: list[Step]):
    with tempfile.TemporaryDirectory() as root:
        trio.run(replay, LocalStore(Path(root), inline=True), history)
