"""Paths: they are distinct, sort by window, and can be parsed."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits, paths
from protocol.errors import MalformedError
from tests.support.builders.samples import MINER, TRAINER, VALIDATOR, digest

KEY, OTHER = TRAINER.public, MINER.public
ALL = [
    paths.run(digest("run")),
    paths.participant(KEY),
    paths.file(KEY, digest("file")),
    paths.head(KEY),
    paths.manifest(KEY, 3, digest("manifest")),
    paths.patch(KEY, digest("patch")),
    paths.anchor(KEY, digest("anchor")),
    paths.commitment(KEY, 3),
    paths.batch(KEY, 3, digest("batch")),
    paths.verdict(KEY, 3, OTHER),
    paths.summary(KEY, 3),
    paths.witness(KEY, 3),
    paths.round_manifest(KEY, 3),
    paths.newest_round(KEY),
    paths.state_shard(KEY, digest("shard")),
    paths.contribution(KEY, 3),
    paths.payload(KEY, digest("payload")),
]


def test_paths_are_plain_and_short() -> None:
    for path in ALL:
        assert re.fullmatch(r"[a-z0-9-]+(/[a-z0-9-]+)+", path)
        assert len(path) <= limits.MAX_OBJECT_PATH_BYTES
        assert max(map(len, path.split("/"))) <= limits.MAX_OBJECT_PART_BYTES


def test_no_path_is_a_directory_of_another() -> None:
    assert len(set(ALL)) == len(ALL)
    assert not [(a, b) for a in ALL for b in ALL if b.startswith(a + "/")]


def test_paths_begin_with_their_prefixes() -> None:
    assert paths.participant(KEY).startswith(paths.participants())
    assert paths.manifest(KEY, 3, digest("m")).startswith(paths.manifests(KEY))
    assert paths.patch(KEY, digest("p")).startswith(paths.patches(KEY))
    assert paths.anchor(KEY, digest("a")).startswith(paths.anchors(KEY))
    assert paths.verdict(KEY, 3, OTHER).startswith(paths.verdicts(KEY, 3))
    assert not paths.verdict(KEY, 30, OTHER).startswith(paths.verdicts(KEY, 3))
    for kind, path in (("commitments", paths.commitment(KEY, 1)), ("summaries", paths.summary(KEY, 1))):
        assert path.startswith(paths.kind_prefix(KEY, kind))


@given(st.integers(0, (1 << 33) - 1), st.integers(0, (1 << 33) - 1))
def test_paths_sort_by_window(first: int, second: int) -> None:
    assert (paths.commitment(KEY, first) < paths.commitment(KEY, second)) == (first < second)


@given(st.integers(0, (1 << 33) - 1), st.binary(min_size=32, max_size=32))
def test_window_and_key_are_parsed(window: int, key: bytes) -> None:
    path = paths.verdict(VALIDATOR.public, window, key)
    assert paths.window_of(path) == window
    assert paths.key_at_end(path) == key


@pytest.mark.parametrize(
    "path", ["", "a", "a/b", "a/12", "a/123456789", "a/+123456789", "a/1_23456789", "a/١٢٣٤٥٦٧٨٩٠"]
)
def test_no_window(path: str) -> None:
    with pytest.raises(MalformedError):
        paths.window_of(path)


@pytest.mark.parametrize(
    "path", ["", "ab", KEY.hex()[1:], KEY.hex().upper(), " " + KEY.hex()[1:], KEY.hex()[:32] + " " * 32, "é" * 64]
)
def test_no_key(path: str) -> None:
    with pytest.raises(MalformedError):
        paths.key_at_end(path)
