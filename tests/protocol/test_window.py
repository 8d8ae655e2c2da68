"""Window arithmetic, the challenges that are derived from randomness, and paths."""

import itertools
import re
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits, paths
from protocol.errors import MalformedError
from protocol.rollout import challenge
from tests.support.builders.samples import MINER, RUN_ID, TRAINER, VALIDATOR, digest, schedule

RANDOMNESS = digest("randomness")


@given(st.integers(0, (1 << 33) - 1), st.integers(0, 9))
def test_a_round_belongs_to_the_window_that_it_opened(window: int, offset: int) -> None:
    assert schedule().window_at(schedule().opening(window) + offset) == window


def test_the_rounds_of_a_window() -> None:
    plan = schedule()
    assert [moment(3) for moment in (plan.opening, plan.deadline, plan.audit, plan.seal, plan.verdict)] == [
        *(130, 136, 138, 150, 160)
    ]
    assert plan.window_at(99) == -1
    assert plan.window_at(100) == 0


def test_a_seed_follows_its_definition() -> None:
    parts = (RUN_ID, (5).to_bytes(8, "little"), RANDOMNESS, MINER.public, (2).to_bytes(8, "little"))
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    assert (
        challenge.group_seed(RUN_ID, 5, RANDOMNESS, MINER.public, 2)
        == blake3(message, derive_key_context="grailnode/1 group").digest()
    )


def test_derived_values_are_distinct() -> None:
    runs, windows, randomness_values, miners = (
        (RUN_ID, digest("other run")),
        (0, 1),
        (RANDOMNESS, digest("r")),
        (MINER.public, TRAINER.public),
    )
    groups = [
        challenge.group_seed(*parts) for parts in itertools.product(runs, windows, randomness_values, miners, range(5))
    ]
    rollouts = [challenge.rollout_seed(group, index) for group in groups for index in range(4)]
    sketches = [challenge.sketch_seed(*parts) for parts in itertools.product(runs, windows, randomness_values)]
    streams = [challenge.stream(seed, context, 32) for seed in sketches for context in ("projection", "topk")]
    values = [value[:16] for value in groups + rollouts + sketches + streams]
    assert len(set(values)) == len(values)


def test_a_longer_stream_begins_with_the_shorter_one() -> None:
    assert challenge.stream(RANDOMNESS, "topk", 100)[:10] == challenge.stream(RANDOMNESS, "topk", 10)


@given(st.integers(0, 200), st.integers(1, 1_000_000), st.binary(min_size=32, max_size=32))
def test_the_number_of_audited_groups(groups: int, share: int, randomness: bytes) -> None:
    indices = challenge.audit_indices(RUN_ID, 1, randomness, MINER.public, groups=groups, share_ppm=share)
    assert list(indices) == sorted(set(indices))
    assert all(0 <= index < groups for index in indices)
    exact = -(-groups * share // 1_000_000)
    assert len(indices) == min(groups, max(1, exact))


def test_every_group_is_audited_equally_often() -> None:
    """Chi-square over 2,000 draws of 4 out of 16: 15 degrees of freedom, 0.9999 quantile 44.3."""
    counts = [0] * 16
    for draw in range(2000):
        for index in challenge.audit_indices(RUN_ID, draw, RANDOMNESS, MINER.public, groups=16, share_ppm=250_000):
            counts[index] += 1
    assert sum(counts) == 8000
    assert sum((count - 500) ** 2 / 500 for count in counts) < 44.3


def test_an_audit_depends_on_every_input() -> None:
    base: dict[str, Any] = {"run": RUN_ID, "window": 1, "randomness": RANDOMNESS, "miner": MINER.public}
    changes: list[dict[str, Any]] = [
        {},
        {"run": digest("x")},
        {"window": 2},
        {"randomness": digest("y")},
        {"miner": TRAINER.public},
    ]
    picks = {challenge.audit_indices(**(base | change), groups=1000, share_ppm=20_000) for change in changes}
    assert len(picks) == len(changes)


# Paths: they are distinct, sort by window, and can be parsed


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
    paths.round_plan(KEY, 3),
    paths.products(KEY, 3, KEY),
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
    assert paths.manifest(KEY, 3, digest("m")).startswith(paths.kind_prefix(KEY, "manifests"))
    assert paths.patch(KEY, digest("p")).startswith(paths.kind_prefix(KEY, "patches"))
    assert paths.anchor(KEY, digest("a")).startswith(paths.kind_prefix(KEY, "anchors"))
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
