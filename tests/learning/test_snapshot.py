"""Snapshots of tensors that training changes in place."""

import torch

from roles.trainer.learn.snapshot import SnapshotSource


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_snapshot_is_a_rounded_copy_that_later_changes_do_not_affect():
    masters = {"a": torch.randn(5, 7), "b": torch.randn(())}
    source = SnapshotSource(masters, torch.bfloat16)
    first = source.take()
    expected = {name: tensor.bfloat16() for name, tensor in masters.items()}
    first.wait_before_writing()
    masters["a"] += 1
    second = source.take()
    assert first.ready
    assert second.ready
    assert equal(first.tensors(), expected)
    assert equal(second.tensors(), {name: tensor.bfloat16() for name, tensor in masters.items()})
