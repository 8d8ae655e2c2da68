"""A trainer's real processes killed with kill -9: its versions have the weights of one that nothing happened to, bit
for bit.
"""

import shutil
from pathlib import Path

import pytest

from tests.support.processes.stepwise_trainer import StepwiseTrainer, make_run

VERSIONS = 4


@pytest.mark.slow
def test_a_killed_trainers_weights_are_those_of_one_that_lived(tmp_path: Path):
    directory = make_run(tmp_path / "lived")
    shutil.copytree(directory, tmp_path / "killed")
    weights = StepwiseTrainer(directory).publish_versions(VERSIONS)
    assert len(set(weights.values())) == len(weights) == VERSIONS + 1
    killed_trainer = StepwiseTrainer(tmp_path / "killed", kills=6)
    assert killed_trainer.publish_versions(VERSIONS) == weights
    assert killed_trainer.kill_counts


@pytest.mark.slow
def test_two_ranks_that_are_killed_publish_the_weights_of_one_process(tmp_path: Path):
    """A step has one pass here, so that the second rank adds nothing to the gradients but its rows of the masters."""
    directory = make_run(tmp_path / "one")
    shutil.copytree(directory, tmp_path / "two")
    settings = tmp_path / "two" / "run.toml"
    settings.write_text(settings.read_text().replace("[trainer]\n", "[trainer]\ngpus = 2\n"))
    weights = StepwiseTrainer(directory).publish_versions(VERSIONS)
    ranks = StepwiseTrainer(tmp_path / "two", kills=6)
    assert ranks.publish_versions(VERSIONS) == weights
    assert ranks.kill_counts
