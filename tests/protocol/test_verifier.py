"""The chain verifier: which heads and manifests it accepts, and how it plans to build a version."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol import limits
from protocol.chain.manifest import Manifest, PatchRef, tensor_table
from protocol.chain.verifier import Trust
from protocol.encoding import content_digest
from protocol.errors import ChainError, ExpiredError, ForkError, GapError, MalformedError, ProtocolError, RollbackError
from protocol.objects import ObjectRef
from tests.protocol.signed_chain import NOW, Trainer, chain, follow, steps, verifier
from tests.support.builders import samples
from tests.support.builders.samples import RUN_ID

REFUSED_HEADS: dict[str, tuple[Callable[[Trainer], bytes], type[ProtocolError]]] = {
    "an older epoch": (lambda trainer: trainer.head(epoch=4), RollbackError),
    "an older epoch with a newer version": (lambda trainer: trainer.add().head(epoch=4), RollbackError),
    "another manifest": (lambda trainer: chain(2).add(optimizer_step=99).add().head(epoch=5), ForkError),
    "expired long ago": (lambda trainer: trainer.head(epoch=5, expires_ms=0), ExpiredError),
    "expired a millisecond ago": (lambda trainer: trainer.head(epoch=5, expires_ms=999_999), ExpiredError),
    "expired now": (lambda trainer: trainer.head(epoch=5, expires_ms=1_000_000), ExpiredError),
    "a manifest": (lambda trainer: trainer.data(0), MalformedError),
}


@pytest.mark.parametrize(("head", "error"), REFUSED_HEADS.values(), ids=REFUSED_HEADS)
def test_a_refused_head_changes_nothing(head: Callable[[Trainer], bytes], error: type[ProtocolError]) -> None:
    """A node that has followed three versions of epoch 5 refuses it, and so does one that has only its trust."""
    trainer = chain(3)
    node = follow(verifier(), trainer, trainer.head(epoch=5))
    before = (node.head, node.trust, list(node.manifests()))
    refused = head(trainer)
    with pytest.raises(error):
        node.accept_head(refused, NOW)
    with pytest.raises(error):
        verifier(node.trust).accept_head(refused, NOW)
    assert (node.head, node.trust, list(node.manifests())) == before
    good = trainer.add().head(epoch=5, expires_ms=1_000_001)
    for one in (verifier(node.trust), node):
        trust = follow(one, trainer, good).trust
        assert trust is not None and trust.version == len(trainer.manifests) - 1


def test_a_node_refuses_heads_older_than_its_current_head() -> None:
    """This holds even while manifests of the newer head are missing, when the trust is older than both heads."""
    trainer = chain(8)
    node = follow(verifier(), trainer, trainer.head(2))
    node.accept_head(trainer.head(7), NOW)
    node.accept_manifest(7, trainer.data(7))
    with pytest.raises(RollbackError):
        node.accept_head(trainer.head(5), NOW)
    assert node.trust is not None
    assert node.trust.version == 2


def test_two_heads_with_different_manifests_for_one_version_are_a_fork() -> None:
    node = verifier()
    node.accept_head(chain(3).head(), NOW)
    with pytest.raises(ForkError):
        node.accept_head(chain(2).add(optimizer_step=99).head(), NOW)


def test_trust_of_another_run_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="another run"):
        verifier(Trust(run=samples.digest("other"), epoch=0, version=0, digest=samples.digest("x"), revision=0))


# The chain verifier accepts the manifests of a head in any order, and refuses those that do not continue the chain


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=str)
def test_a_new_node_follows_a_chain_whose_manifests_come_in_any_order(order: tuple[int, ...]) -> None:
    node, trainer = verifier(), chain(4)
    node.accept_head(trainer.head(), NOW)
    digests = [content_digest(manifest.to_bytes()) for manifest in trainer.manifests]
    assert list(node.missing_manifests()) == list(enumerate(digests))
    for version in order:
        assert node.trust is None
        node.accept_manifest(version, trainer.data(version))
    assert node.missing_manifests() == []
    assert node.trust == Trust(run=RUN_ID, epoch=1, version=3, digest=digests[3], revision=0)
    assert list(node.manifests()) == trainer.manifests


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"previous": samples.digest("elsewhere")}, ForkError),
        ({"tensors": (("a", "BF16", (2, 3)), ("b", "F32", (1,)))}, ChainError),
        ({"epoch": 0}, ChainError),
        ({"epoch": 2}, ChainError),
        ({"first_window": 0}, ChainError),
        ({"run": samples.digest("other")}, ChainError),
        ({"version": 3}, ChainError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 1, 0)], ids=str)
def test_a_manifest_that_does_not_continue_the_chain_is_refused(
    change: dict[str, Any], error: type[ProtocolError], order: tuple[int, ...]
) -> None:
    """Such a manifest is refused in whatever order it arrives, though the head lists it and the trainer signed it."""
    trainer = chain(2)
    trainer.manifests.append(
        samples.manifest(2, content_digest(trainer.manifests[1].to_bytes())).model_copy(update=change)
    )
    node = verifier()
    node.accept_head(trainer.head(), NOW)
    with pytest.raises(error):
        for version in order:
            node.accept_manifest(version, trainer.data(version))
    assert node.trust is None
    assert len(list(node.manifests())) < 3


def test_a_manifest_that_the_head_does_not_list_is_refused() -> None:
    node = verifier()
    node.accept_head(chain(2).head(), NOW)
    with pytest.raises(ChainError, match="not the one that the head lists"):
        node.accept_manifest(1, chain(1).add(optimizer_step=99).data(1))
    with pytest.raises(ValueError, match="does not list version 2"):
        node.accept_manifest(2, chain(3).data(2))


# The chain verifier plans how to build a version: by patches from the weights in memory, or from an anchor


ANCHOR = samples.manifest().anchor
PLANS: dict[str, tuple[Trainer, dict[str, Any], dict[tuple[int | None, int], Any]]] = {
    # a chain, fields of its head, and by (version in memory, version to build): the plan's steps, or None for a gap
    "patches forwards, the anchor backwards": (
        chain(5),
        {},
        {(2, 4): (None, [3, 4]), (4, 4): (None, []), (None, 4): (0, [1, 2, 3, 4]), (4, 2): (0, [1, 2])},
    ),
    "the newest anchor": (
        chain(2).add(anchor=ANCHOR).add().add(anchor=ANCHOR).add(),
        {"anchors": (0, 2, 4)},
        {(None, 5): (4, [5]), (None, 3): (2, [3]), (0, 5): (None, [1, 2, 3, 4, 5])},
    ),
    "an anchor that is not complete": (chain(2).add(anchor=ANCHOR), {}, {(None, 2): (0, [1, 2])}),
    "an anchor that is not in its manifest": (chain(3), {"anchors": (0, 2)}, {(None, 2): (0, [1, 2])}),
    "a version without a patch": (
        chain(2).add(patch=None, anchor=ANCHOR).add(),
        {"anchors": (0, 2)},
        {(1, 3): (2, [3]), (1, 2): (2, []), (2, 3): (None, [3])},
    ),
    "a version without a patch, whose anchor is not complete": (
        chain(2).add(patch=None, anchor=ANCHOR).add(),
        {},
        {(1, 3): None, (0, 1): (None, [1])},
    ),
    "deleted patches": (
        chain(3).add(anchor=ANCHOR).add().add(),
        {"anchors": (0, 3), "oldest_patch": 4},
        {(2, 5): (3, [4, 5]), (3, 5): (None, [4, 5]), (None, 0): (0, []), (None, 2): None},
    ),
    "a new node begins at the base": (chain(3).add(anchor=ANCHOR).add(), {"base": 3}, {(None, 4): (3, [4])}),
    "versions outside the chain": (chain(5), {}, {(2, -1): None, (2, 6): None, (2, 1 << 40): None}),
    "a long chain": (chain(300), {}, {(None, 299): (0, list(range(1, 300)))}),
}


@pytest.mark.parametrize(("trainer", "head", "plans"), PLANS.values(), ids=PLANS)
def test_plans(trainer: Trainer, head: dict[str, Any], plans: dict[tuple[int | None, int], Any]) -> None:
    node = follow(verifier(), trainer, trainer.head(**head))
    for (current, target), expected in plans.items():
        if expected is None:
            with pytest.raises(GapError):
                node.plan(current, target)
        else:
            assert steps(node.plan(current, target)) == expected


def test_the_slow_path_uses_no_weights_in_memory() -> None:
    assert steps(follow(verifier(), chain(5)).slow_plan(4)) == (0, [1, 2, 3, 4])


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


# The checks that a head or a manifest passes by itself


def test_the_longest_head_can_be_written() -> None:
    samples.head(manifests=(samples.digest("m"),) * limits.MAX_CHAIN, anchors=tuple(range(limits.MAX_CHAIN))).to_bytes()


def test_check_table() -> None:
    weights = samples.weights()
    manifest = samples.manifest(tensors=tensor_table(weights))
    manifest.check_table(weights)
    assert manifest.elements == 24 + 6 + 0 + 1 + 5 + 2
    with pytest.raises(MalformedError):
        manifest.check_table({**weights, "bias": weights["bias"][:5]})


# A manifest cannot refer to objects larger than its tensors need, because readers download and store their sizes


WEIGHTS = 6 * 2 + 4  # bytes of the tensors of samples.TABLE
PATCH = 2 * WEIGHTS + limits.MAX_PATCH_HEADER_BYTES
HEADER = limits.MAX_SAFETENSORS_HEADER_BYTES


def patch(*sizes: int) -> dict[str, Any]:
    refs = (ObjectRef(digest=samples.digest(f"part {place}"), size=size) for place, size in enumerate(sizes))
    return {"patch": PatchRef(parts=tuple(refs), changed=1)}


def anchor(*sizes: int) -> dict[str, Any]:
    shards = (ObjectRef(digest=samples.digest(f"shard {place}"), size=size) for place, size in enumerate(sizes))
    return {"anchor": tuple(shards)}


@pytest.mark.parametrize(
    "changes",
    [
        patch(PATCH),
        patch(0, PATCH - 1, 1),
        anchor(WEIGHTS + HEADER),
        anchor(WEIGHTS + 2 * HEADER, 0),
        anchor(HEADER, WEIGHTS, 2 * HEADER),
        patch(PATCH) | anchor(WEIGHTS + HEADER),
    ],
)
def test_objects_up_to_the_size_of_their_tensors_are_accepted(changes: dict[str, Any]) -> None:
    manifest = samples.manifest(1, samples.digest("manifest 0"), **changes)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


@pytest.mark.parametrize(
    "changes",
    [
        patch(PATCH + 1),
        patch(PATCH, 1),
        patch(limits.MAX_PATCH_BYTES),
        anchor(WEIGHTS + HEADER + 1),
        anchor(WEIGHTS + 2 * HEADER, 1),
        anchor(limits.MAX_SHARD_BYTES),
        anchor(*(HEADER for _ in range(8)), WEIGHTS + HEADER + 1),
        patch(PATCH + 1) | anchor(WEIGHTS),
        patch(1) | anchor(WEIGHTS + HEADER + 1),
    ],
)
def test_objects_larger_than_their_tensors_are_refused(changes: dict[str, Any]) -> None:
    honest = samples.manifest(1, samples.digest("manifest 0"))
    with pytest.raises(ValidationError, match="larger than its tensors"):
        Manifest(**(dict(honest) | changes))
    with pytest.raises(MalformedError, match="larger than its tensors"):
        Manifest.from_bytes(honest.model_copy(update=changes).to_bytes())
