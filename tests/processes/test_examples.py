"""Training loops of others: the programs of examples/ against a real network, and on two ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

from grailnode.engine.policy import PACKAGED_POLICY, load_weights
from grailnode.library import follow
from grailnode.store.state.state_store import StateStore
from protocol.digest import digest_weights
from roles.trainer.spool import INBOX
from tests.support.builders.verified_batches import put_batch
from tests.support.processes.network_of_processes import RULES, NetworkOfProcesses
from tests.support.processes.programs import ENVIRONMENT, PATIENCE, ROOT
from tests.support.processes.stepwise_trainer import make_run, trainer_state

pytestmark = pytest.mark.slow

NO_TRL = "GRAILNODE_TRL_PYTHON names no interpreter with TRL; `pip install . 'trl==1.16.*'` makes one"
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def network(tmp_path: Path) -> Iterator[NetworkOfProcesses]:
    # windows of 8 seconds: with shorter ones, miner and validator would work most of the time for groups nobody takes
    network = NetworkOfProcesses(tmp_path / "network", RULES.in_rounds(4 * RULES.rounds))
    yield network
    network.end()


def run_example(*command: str) -> None:
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT | CPU_ONLY | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_trl_learns_from_the_groups_of_a_network_and_goes_on_from_its_checkpoint(
    network: NetworkOfProcesses, tmp_path: Path
) -> None:
    python, run = os.environ.get("GRAILNODE_TRL_PYTHON", ""), str(network.workspace.config)
    if not Path(python).is_file():
        pytest.skip(NO_TRL)
    network.start("validator", "validator")
    network.start("miner", "miner-1")
    checkpoints = tmp_path / "checkpoints"
    for steps in (1, 2):
        run_example(python, "examples/trl_grpo.py", run, str(checkpoints), "--steps", str(steps), "--groups", "2")
    history: list[dict[str, Any]] = json.loads((checkpoints / "checkpoint-2/trainer_state.json").read_text())[
        "log_history"
    ]
    digests = [digest for line in history for digest in line.get("groups", ())]
    assert len(digests) == len(set(digests)) == 2 * 2
    figures = [line for line in history if "reward" in line]
    assert [line["step"] for line in figures] == [1, 2]
    # the verified log-probabilities are those of TRL's own model up to rounding: else ratios would be out of bounds
    assert all(line["clip_ratio/region_mean"] < 0.05 for line in figures)
    version = next(iter(follow(run)))
    assert (version.number, version.step) == (2, 2)
    weights = load_file(checkpoints / "checkpoint-2/model.safetensors")
    assert version.digest == digest_weights({name: weights[name].bfloat16() for name in version.weights})


def test_ranks_of_fsdp_publish_what_their_checkpoint_has(tmp_path: Path) -> None:
    directory, checkpoints = make_run(tmp_path / "run"), tmp_path / "checkpoints"
    run = str(directory / "run.toml")
    state = trainer_state(directory)
    for number in range(1, 5):
        trio.run(put_batch, state, number)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for steps in ("1", "2"):
        run_example(*launcher, "examples/fsdp2.py", run, str(checkpoints), steps)
    version = next(iter(follow(run)))
    assert (version.number, version.step) == (2, 2)
    weights: dict[str, Any] = {"weights": {name: tensor.float() for name, tensor in version.weights.items()}}
    load_checkpoint(weights, checkpoint_id=checkpoints / "00000002")
    assert version.digest == digest_weights({name: tensor.bfloat16() for name, tensor in weights["weights"].items()})
    assert version.digest != digest_weights(load_weights(PACKAGED_POLICY))
    trio.run(check_empty, state)


async def check_empty(state: StateStore) -> None:
    """Check that all groups are acknowledged."""
    assert not [item.path async for item in state.list(INBOX)]
