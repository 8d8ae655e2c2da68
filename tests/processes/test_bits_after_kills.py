"""A trainer's real processes killed with kill -9: its versions have the weights of one that nothing happened to, bit
for bit.
"""

import shutil
from pathlib import Path

from tests.support.processes.fed_trainer import FedTrainer, make

VERSIONS = 4


def test_a_killed_trainers_weights_are_those_of_one_that_lived(tmp_path: Path):
    made = make(tmp_path / "lived")
    shutil.copytree(made, tmp_path / "killed")
    lived = FedTrainer(made).live(VERSIONS)
    assert len(set(lived.values())) == len(lived) == VERSIONS + 1
    dying = FedTrainer(tmp_path / "killed", kills=6)
    assert dying.live(VERSIONS) == lived
    assert dying.killed
