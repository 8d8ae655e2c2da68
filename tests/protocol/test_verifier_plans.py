"""The chain verifier plans how to build a version: by patches from the weights in memory, or from an anchor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import (
    GapError,
)
from tests.protocol.signed_chain import NOW, Trainer, chain, follow, steps, verifier
from tests.support.builders import samples


def test_fast_and_slow_path() -> None:
    node = follow(verifier(), chain(5))
    assert steps(node.plan(2, 4)) == (None, [3, 4])
    assert steps(node.plan(4, 4)) == (None, [])
    assert steps(node.plan(None, 4)) == (0, [1, 2, 3, 4])
    assert steps(node.plan(4, 2)) == (0, [1, 2])
    assert steps(node.slow_plan(4)) == (0, [1, 2, 3, 4])


def test_the_slow_path_begins_at_the_newest_anchor() -> None:
    trainer = chain(2)
    trainer.add(anchor=samples.manifest().anchor).add().add(anchor=samples.manifest().anchor).add()
    node = follow(verifier(), trainer, trainer.head(anchors=(0, 2, 4)))
    assert steps(node.plan(None, 5)) == (4, [5])
    assert steps(node.plan(None, 3)) == (2, [3])
    assert steps(node.plan(0, 5)) == (None, [1, 2, 3, 4, 5])


def test_an_incomplete_anchor_is_not_used() -> None:
    trainer = chain(2).add(anchor=samples.manifest().anchor)
    assert steps(follow(verifier(), trainer).plan(None, 2)) == (0, [1, 2])


def test_an_anchor_that_is_not_in_its_manifest_is_not_used() -> None:
    trainer = chain(3)
    assert steps(follow(verifier(), trainer, trainer.head(anchors=(0, 2))).plan(None, 2)) == (0, [1, 2])


def test_plans_around_a_version_without_a_patch() -> None:
    trainer = chain(2).add(patch=None, anchor=samples.manifest().anchor).add()
    node = follow(verifier(), trainer, trainer.head(anchors=(0, 2)))
    assert steps(node.plan(1, 3)) == (2, [3])
    assert steps(node.plan(1, 2)) == (2, [])
    assert steps(node.plan(2, 3)) == (None, [3])
    gap = follow(verifier(), trainer)  # version 2's anchor is not complete
    with pytest.raises(GapError):
        gap.plan(1, 3)
    assert steps(gap.plan(0, 1)) == (None, [1])


def test_plans_without_deleted_patches() -> None:
    trainer = chain(3).add(anchor=samples.manifest().anchor).add().add()
    node = follow(verifier(), trainer, trainer.head(anchors=(0, 3), oldest_patch=4))
    assert steps(node.plan(2, 5)) == (3, [4, 5])
    assert steps(node.plan(3, 5)) == (None, [4, 5])
    assert steps(node.plan(None, 0)) == (0, [])
    with pytest.raises(GapError):
        node.plan(None, 2)


@pytest.mark.parametrize("target", [-1, 6, 1 << 40])
def test_a_version_outside_the_chain_is_a_gap(target: int) -> None:
    with pytest.raises(GapError):
        follow(verifier(), chain(5)).plan(2, target)


def test_a_verifier_without_a_head_has_no_plan() -> None:
    with pytest.raises(GapError):
        verifier().plan(None, 0)
    with pytest.raises(GapError):
        verifier().version_for(0)
    with pytest.raises(GapError):
        verifier().manifest(0)


def test_manifests_older_than_the_base_are_forgotten() -> None:
    trainer = chain(3).add(anchor=samples.manifest().anchor)
    node = follow(verifier(), trainer)
    node.accept_head(trainer.head(base=3), NOW)
    assert [manifest.version for manifest in node.manifests()] == [3]
    with pytest.raises(GapError):
        node.manifest(2)
    assert steps(node.plan(None, 3)) == (3, [])


def test_a_new_node_begins_at_the_base() -> None:
    trainer = chain(3).add(anchor=samples.manifest().anchor).add()
    node = follow(verifier(), trainer, trainer.head(base=3))
    assert steps(node.plan(None, 4)) == (3, [4])


def test_the_version_of_a_window() -> None:
    trainer = Trainer()
    for first_window in (0, 4, 4, 9):
        trainer.add(first_window=first_window)
    node = follow(verifier(), trainer)
    assert [node.version_for(window) for window in (0, 3, 4, 8, 9, 100)] == [0, 0, 2, 2, 3, 3]
    with pytest.raises(GapError):
        node.version_for(-1)


def test_a_node_with_missing_manifests_does_not_know_the_version_of_a_window() -> None:
    """Otherwise it would judge honest work of the newer version by the older one."""
    trainer = chain(3)
    node = follow(verifier(), trainer, trainer.head(1))
    node.accept_head(trainer.head(), NOW)
    with pytest.raises(GapError):
        node.version_for(5)
    node.accept_manifest(2, trainer.data(2))
    assert node.version_for(5) == 2


def test_a_plan_for_a_long_chain() -> None:
    versions = 300
    trainer = chain(versions)
    node = follow(verifier(), trainer)
    assert steps(node.plan(None, versions - 1)) == (0, list(range(1, versions)))


@given(st.data())
def test_a_plan_leads_to_its_target(data: st.DataObject) -> None:
    """For any history, every step of a plan is a patch in storage from the version before, or there is a gap."""
    versions = data.draw(st.integers(1, 12))
    trainer = Trainer()
    for version in range(versions):
        shape = data.draw(st.sampled_from(["patch", "anchor", "both"])) if version else "anchor"
        anchor = () if shape == "patch" else samples.manifest().anchor
        trainer.add(anchor=anchor, **({"patch": None} if shape == "anchor" else {}))
    base = data.draw(st.integers(0, versions - 1))
    anchors = tuple(sorted(data.draw(st.sets(st.integers(base, versions - 1), min_size=1))))
    oldest_patch = data.draw(st.integers(anchors[0], versions))
    node = follow(verifier(), trainer, trainer.head(base=base, anchors=anchors, oldest_patch=oldest_patch))
    current = data.draw(st.none() | st.integers(0, versions - 1))
    target = data.draw(st.integers(0, versions))
    usable = {anchor for anchor in anchors if trainer.manifests[anchor].anchor}
    versions_with_patch = {
        v for v in range(base, versions) if v >= oldest_patch and trainer.manifests[v].patch is not None
    }
    starts = usable if current is None else usable | {current}
    possible = any(start <= target and set(range(start + 1, target + 1)) <= versions_with_patch for start in starts)
    try:
        plan = node.plan(current, target)
    except GapError:
        assert not possible
        return
    assert possible
    at = current if plan.anchor is None else plan.anchor.version
    assert plan.anchor is None or at in usable
    for manifest in plan.patches:
        assert at is not None
        assert manifest.version == at + 1
        assert manifest.version in versions_with_patch
        at += 1
    assert at == target
