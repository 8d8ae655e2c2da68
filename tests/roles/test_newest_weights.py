"""The weights from which training continues are the newest, wherever they lie (roles/trainer/spool.py)."""

import pytest
import torch

from grailnode.store.memory import MemoryStore
from roles.trainer.spool import PUBLISHED_WEIGHTS, newest_weights, weights_folder
from roles.trainer.tensor_shards import TensorSource, put_shards, read_tensors, run_inline
from tests.support.builders.snapshots import put_snapshot
from tests.support.simulation.virtual_clock import simulated


@pytest.mark.parametrize(("queued", "published"), [(None, None), (1, None), (None, 2), (1, 2), (2, 2), (3, 2)])
@simulated
async def test_the_newest_of_outbox_and_published_weights(queued: int | None, published: int | None) -> None:
    state = MemoryStore()
    if queued is not None:
        await put_snapshot(state, queued, {"w": torch.full((4,), float(queued))})
    if published is not None:
        source = TensorSource.of({"w": torch.full((4,), float(published))})
        count = await put_shards(state, weights_folder(published), source, run_inline)
        await state.put(f"{PUBLISHED_WEIGHTS}{published:010d}", str(count).encode())
    newest = await newest_weights(state)
    versions = [version for version in (queued, published) if version is not None]
    if not versions:
        assert newest is None
        return
    assert newest is not None
    weights = await read_tensors(state, weights_folder(newest[0]), newest[1])
    assert (newest[0], weights["w"][0].item()) == (max(versions), max(versions))
