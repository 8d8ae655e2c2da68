"""Followers of quantized versions: equal bit for bit by patches and anchors; bad scales and tables are never used."""

from itertools import pairwise

import pytest
import torch

from grailnode.store.memory import MemoryStore
from protocol.digest import digest_weights
from protocol.encoding import content_digest
from protocol.errors import ChainError
from protocol.quantization import SCALE, Precision, quantize
from roles.policy.follower import Follower
from tests.support.attacked_nodes.follower import HOUR_MS
from tests.support.builders.chains import Chain, make_node, small_run
from tests.support.simulation.network import BEGIN, Log
from tests.support.simulation.virtual_clock import simulated

MATRIX = "model.layers.0.mlp.up_proj.weight"
PRECISIONS: tuple[Precision, ...] = ("fp8", "int8")


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """Return float32 weights after some small steps; a row's largest weight doubles with each."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(32, 16, generator=generator)
    for _ in range(step):
        matrix += 0.02 * torch.randn(matrix.shape, generator=generator)
        matrix[3, 2] = 2 * matrix[3].abs().max()
    return {MATRIX: matrix, "model.norm.weight": torch.ones(16) + step}


class Testbed:
    """A store with a quantized chain, and a node that follows it."""

    __test__ = False

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.store, self.log = MemoryStore(), Log("miner")
        _, run = small_run(digest_weights(self.version(0)))
        self.run = run.model_copy(update={"precision": precision})
        self.run_id = content_digest(self.run.to_bytes())
        self.chain = Chain(self.run_id, self.store, int(BEGIN * 1000) + HOUR_MS)

    def version(self, step: int) -> dict[str, torch.Tensor]:
        return quantize(weights_of(step), self.precision)

    async def follower(self) -> Follower:
        """Return a new follower that knows the newest head."""
        follower = await Follower.open(make_node(self.run_id, self.run, self.store, MemoryStore(), self.log))
        await follower.refresh()
        return follower


@pytest.mark.parametrize("precision", PRECISIONS)
@simulated
async def test_patches_lead_to_the_quantization_of_each_version(precision: Precision) -> None:
    testbed = Testbed(precision)
    for step in range(6):
        await testbed.chain.publish(testbed.version(step), anchor=step == 3)
    follower = await testbed.follower()
    for version in range(6):
        weights = await follower.rebuild(version)
        assert weights.digest == digest_weights(testbed.version(version)) == digest_weights(weights.weights)
    late = await testbed.follower()
    assert (await late.rebuild(5)).digest == weights.digest
    scales = [testbed.version(step)[MATRIX + SCALE] for step in range(6)]
    assert all(other[3] == 2 * one[3] for one, other in pairwise(scales))
    assert all((one != other).sum() < 4 for one, other in pairwise(scales))


BAD_SCALES = {
    "NaN": float("nan"),
    "infinite": float("inf"),
    "zero": 0.0,
    "negative zero": -0.0,
    "negative": -(2.0**-5),
    "no power of two": 1.5,
    "too large": 2.0**65,
    "too small": 2.0**-65,
    "a subnormal": 2.0**-130,
}


@pytest.mark.parametrize("has_anchor", [False, True], ids=["by a patch", "by an anchor"])
@pytest.mark.parametrize("value", BAD_SCALES.values(), ids=BAD_SCALES)
@simulated
async def test_a_bad_scale_is_refused_although_the_trainer_has_signed_it(value: float, has_anchor: bool) -> None:
    testbed = Testbed("fp8")
    await testbed.chain.publish(testbed.version(0))
    bad = testbed.version(1)
    bad[MATRIX + SCALE][5] = value
    follower = await testbed.follower()
    good = await follower.rebuild(0)
    await testbed.chain.publish(bad, anchor=has_anchor)
    for one in (follower, await testbed.follower()):
        await one.refresh()
        with pytest.raises(ChainError, match=f"{MATRIX}{SCALE}: a scale that is no power of two"):
            await one.rebuild(1)
        assert (await one.rebuild(0)).digest == good.digest
    await testbed.chain.publish(testbed.version(2), anchor=True)
    await follower.refresh()
    assert (await follower.rebuild(2)).version == 2
