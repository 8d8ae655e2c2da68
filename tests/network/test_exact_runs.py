"""An exact run from end to end: miners and validators that batch differently accept all of each other's work."""

from dataclasses import replace

import pytest

from grailnode.engine import models
from grailnode.engine.compute import Compute
from tests.support.simulation.network import Network
from tests.support.simulation.network_runs import CHOICES, run_nodes, summaries
from tests.support.simulation.virtual_clock import simulated


@pytest.mark.slow
@simulated
async def test_in_an_exact_run_honest_work_is_trained_on():
    network = Network(replace(CHOICES, numerics="exact"), validators=2, quorum=2)
    assert network.run.proof.logprob_tolerance("exact", "exact") == 0.0
    network.compute = Compute(models.build_exact(network.policy), max_batch_tokens=64)
    async with run_nodes(network, miners=1):
        await network.until_window(4)
    rows = [
        row
        for name in ("validator-0", "validator-1")
        for summary in await summaries(network, name, range(4))
        for row in summary.rows
    ]
    assert sum(row.accepted for row in rows) > 0
    assert [row for row in rows if row.rejected or row.sketch_misses or row.margin_misses] == []
    assert network.events("trainer/training", "step")
    assert not network.events("trainer/download", "validators-disagree")
