"""The plug-ins of examples/ with games of Gymnasium and TextArena, from their wheels in the sandbox."""

import os
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from grailnode.environments import contract, registry
from tests.support.builders.plugins import install_example
from tests.support.builders.tasks import NO_GYM, open_sandbox

STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
pytestmark = pytest.mark.slow


@pytest.fixture(params=["gymnasium", "textarena"])
def games(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a plug-in of examples/ beside the packages of another environment, and return the plug-in's folder."""
    open_sandbox()
    python = os.environ.get("GRAILNODE_GYM_PYTHON", "")
    if not python:
        pytest.skip(NO_GYM)
    command = (python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    packages = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(sys, "path", [str(install_example(request.param, tmp_path)), *sys.path, packages])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(request.param)


@pytest.mark.parametrize("games", ["gymnasium"], indirect=True)
def test_a_lake_is_crossed_by_the_actions_of_a_path(games: str) -> None:
    environment = registry.open_plugin("frozen-lake", "{}").environment
    problem = environment.problem(bytes(32))
    rows = problem.prompt.splitlines()[1:5]
    paths = deque([((0, 0), list[str]())])
    while paths:
        (row, column), path = paths.popleft()
        if rows[row][column] == "G":
            break
        for action, (down, right) in STEPS.items():
            place = row + down, column + right
            if len(path) < 8 and min(place) >= 0 and max(place) < 4 and rows[place[0]][place[1]] != "H":
                paths.append((place, [*path, action]))
    episode = environment.begin(problem, bytes(32))
    replies = [episode.step(action) for action in path]
    assert replies[-1] is None and None not in replies[:-1]
    assert all(reply is None or reply.count("@") == 1 for reply in replies)
    assert episode.reward() == 1.0
    environment.close()


CONFIGS = {
    "gymnasium": {
        "frozen-lake": '{"options": {"is_slippery": true}}',
        "cliff-walking": '{"options": {"is_slippery": true}}',
        "taxi": "{}",
        "blackjack": "{}",
    },
    "textarena": {"textarena": '{"game": "Mastermind-v0"}'},
}


def test_games_keep_the_contract(games: str) -> None:
    for name, config in CONFIGS[games].items():
        first, second = (contract.observe_by_hash_seed(name, config, None, hash_seed) for hash_seed in (1, 2))
        assert [line for line in contract.failures(first, second) if line[1]] == []
        if name == "cliff-walking":  # its prompt names the actions, so that words of it are moves
            assert any(len(set(replies)) > 2 for _, replies, _ in first.plays)
