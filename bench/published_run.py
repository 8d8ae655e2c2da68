"""Workload B: consecutive versions that a run has published, as its followers get them.

Reads the chain of a run that `grailnode demo --keep` left behind, every signature and digest checked; runs a short demo first where
none is given.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import trio

from grailnode.config import load
from grailnode.node_process import make_spectator
from grailnode.verification import follow_chain

Weights = dict[str, torch.Tensor]


def published_versions(run_file: Path, last: int) -> list[Weights]:
    """The newest `last` versions of a run, oldest first.

    Raises:
        ProtocolError: the chain does not hold.
    """

    async def read() -> list[Weights]:
        held = [dict(held.weights) async for held in follow_chain(make_spectator(load(run_file)), lambda line: None)]
        return held[-last:]

    return trio.run(read)


@contextmanager
def demo_run(windows: int) -> Iterator[Path]:
    """The run.toml of a demo of so many windows, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "grailnode", "demo", "--keep", "--windows", str(windows), "--out", folder)
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        yield Path(folder) / "network" / "run.toml"
