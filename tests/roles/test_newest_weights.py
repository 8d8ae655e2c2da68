"""The weights from which training continues are the newest, wherever they lie (roles/trainer/spool.py)."""

import pytest
import safetensors.torch
import torch

from grailnode.store.memory import MemoryStore
from roles.trainer.spool import PUBLISHED_WEIGHTS, SnapshotName, newest_weights, put_snapshot
from tests.support.simulation.virtual_clock import simulate


@pytest.mark.parametrize(("queued", "published"), [(None, None), (1, None), (None, 2), (1, 2), (2, 2), (3, 2)])
def test_the_newest_of_outbox_and_published_weights(queued: int | None, published: int | None) -> None:
    async def scenario() -> None:
        state = MemoryStore()
        if queued is not None:
            await put_snapshot(state, SnapshotName(queued, queued), {"w": torch.full((4,), float(queued))})
        if published is not None:
            data = safetensors.torch.save({"w": torch.full((4,), float(published))})
            await state.put(f"{PUBLISHED_WEIGHTS}{published:010d}", data)
        newest = await newest_weights(state)
        versions = [version for version in (queued, published) if version is not None]
        if not versions:
            assert newest is None
            return
        assert newest is not None
        assert (newest[0], newest[1]["w"][0].item()) == (max(versions), max(versions))

    simulate(scenario)
