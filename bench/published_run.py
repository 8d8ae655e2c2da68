"""Workload B: consecutive versions of the demo's own run.

Either those that its learner makes (bench/learning.py: without a clock, so the same on any machine), or those of a run
that `grailnode demo --keep` left behind, as its followers get them, every signature and digest checked.
"""

from pathlib import Path

import torch
import trio

from bench.learning import Setup, Simulation
from grailnode.config import load
from grailnode.node.processes import make_spectator
from grailnode.observe.chain_check import follow_chain

Weights = dict[str, torch.Tensor]


def published_versions(run_file: Path) -> list[Weights]:
    """The versions of a run that its kept anchors and patches lead to, oldest first.

    Raises:
        ProtocolError: the chain does not hold.
    """

    async def read() -> list[Weights]:
        return [dict(held.weights) async for held in follow_chain(make_spectator(load(run_file)), lambda line: None)]

    return trio.run(read)


def trained_versions(windows: int, seed: int) -> list[Weights]:
    """The versions that the demo's trainer publishes in so many windows, oldest first: the same genesis, learner and
    settings.
    """
    simulation = Simulation(Setup(windows=windows, seed=seed, held_out=1))
    for window in range(windows):
        simulation.window(window)
    return [dict(version) for version in simulation.versions]
