"""Workload B of the patch benchmarks: consecutive versions of the demo.

They are either the versions that the demo's learner makes in bench/learning.py, which uses no clock and therefore makes
the same ones on any machine, or those of a run that `grailnode demo --keep` has kept. The latter are read as a follower
reads them, and all signatures and digests are checked.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import trio

from grailnode.config import load
from grailnode.node.node_makers import make_spectator
from grailnode.observe.chain_check import follow_chain
from tests.support.simulation.learning import Setup, Simulation

Weights = dict[str, torch.Tensor]


def visit_versions(run_file: Path, visit: Callable[[Weights], object]) -> None:
    """Call a function with each version of a run that its stored anchors and patches give, oldest first."""

    async def read() -> None:
        async for version in follow_chain(make_spectator(load(run_file)), lambda line: None):
            visit(dict(version.weights))

    trio.run(read)


def published_versions(run_file: Path) -> list[Weights]:
    """Return all versions of a run, oldest first; see `visit_versions`."""
    versions: list[Weights] = []
    visit_versions(run_file, versions.append)
    return versions


def trained_versions(windows: int, seed: int) -> list[Weights]:
    """Return the versions that the demo's genesis, learner and settings give in `windows` windows, oldest first."""
    simulation = Simulation(Setup(windows=windows, seed=seed, held_out=1))
    for window in range(windows):
        simulation.window(window)
    return [dict(version) for version in simulation.versions]
