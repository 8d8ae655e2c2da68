"""Gymnasium's text environments as episodes: FrozenLake, Taxi, CliffWalking and Blackjack.

    pip install examples/gymnasium
    grailnode environments try frozen-lake --answer down --answer right

A plug-in of yours that requires `grailnode-gymnasium` brings another one, by a subclass of `TextTask`: with its `name`
(the id that `gymnasium.make` gets), its `rules`, and `actions` if its actions are no texts.

The configuration may have `turns` and `options` (what `gymnasium.make` gets). A problem is a seed of `reset`, and its
prompt the first observation. What the environment draws later comes from the seed of the episode.
"""

import hashlib
import random
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from gymnasium.spaces import Discrete, Text


class TextTask:
    """An environment whose observations are texts, and whose actions are texts or have words for them."""

    exact = True
    held_out_size = 500
    name: str
    rules: str
    actions: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: dict[str, Any]) -> None:
        if unknown := config.keys() - {"turns", "options"}:
            raise ValueError(f"{self.name}: takes turns and options, and no {min(unknown)!r}")
        self.turns = config.get("turns", 32)
        self.options = {**self.options, **config.get("options", {})}
        self.env = self.make(0)
        space = self.env.action_space
        if not isinstance(space, Text) and not (isinstance(space, Discrete) and len(self.actions) == space.n):
            raise ValueError(f"{self.name}: its actions are neither texts nor have words for them")

    def problem(self, seed: bytes) -> dict[str, Any]:
        return self._drawn(random.Random(seed), held_out=False)

    def held_out_problem(self, index: int) -> dict[str, Any]:
        return self._drawn(random.Random(f"held out {index}"), held_out=True)

    def _drawn(self, rng: random.Random, *, held_out: bool) -> dict[str, Any]:
        """Return a problem whose text is held out, or is not; any one where all texts are alike, as on the cliff."""
        for _ in range(100):
            number = rng.randrange(1 << 31)
            prompt = f"{self.rules}\n{Game(self, number).text}"
            if (hashlib.sha256(prompt.encode()).digest()[0] < 26) == held_out:
                break
        return {"prompt": prompt, "reference": number}

    def begin(self, problem: dict[str, Any], seed: bytes) -> "Game":
        game = Game(self, problem["reference"])
        game.env.unwrapped.np_random = np.random.Generator(np.random.PCG64(int.from_bytes(seed, "big")))
        return game

    def make(self, number: int) -> gymnasium.Env:
        """Return the environment of a problem."""
        return gymnasium.make(self.name, disable_env_checker=True, **self.options)

    def env_of(self, number: int) -> gymnasium.Env:
        return self.env

    def show(self, env: Any, observation: Any) -> str:
        """Return an observation as a text."""
        return str(observation)

    def score(self, rewards: list[float], *, terminated: bool) -> float:
        """Return the reward of an episode from those of its steps."""
        return min(1.0, max(0.0, sum(rewards)))


class Game:
    """One episode."""

    def __init__(self, task: TextTask, number: int) -> None:
        self.task, self.env = task, task.env_of(number)
        observation, _ = self.env.reset(seed=number)
        self.text = f"{task.show(self.env.unwrapped, observation)}\n"
        self.rewards: list[float] = []
        self.terminated = False

    def step(self, text: str) -> str | None:
        space, action = self.env.action_space, text.strip()
        if not (space.contains(action) if isinstance(space, Text) else action in self.task.actions):
            return f"no such action\n{self.text}"
        choice = action if isinstance(space, Text) else self.task.actions.index(action)
        observation, reward, self.terminated, truncated, _ = self.env.step(choice)
        self.rewards.append(float(reward))
        self.text = f"{self.task.show(self.env.unwrapped, observation)}\n"
        return None if self.terminated or truncated else self.text

    def reward(self) -> float:
        return self.task.score(self.rewards, terminated=self.terminated)


def _with_marker(rows: list[str], row: int, column: int) -> str:
    return "\n".join(
        line[:column] + "@" + line[column + 1 :] if number == row else line for number, line in enumerate(rows)
    )


class FrozenLake(TextTask):
    """A lake of its own for each problem; `options` may have `is_slippery`."""

    name = "FrozenLake-v1"
    rules = "You are @. Walk over the ice F from S to G, and into no hole H. A turn is one of: left, down, right, up."
    actions = ("left", "down", "right", "up")
    options: ClassVar[dict[str, Any]] = {"is_slippery": False}

    def make(self, number: int) -> gymnasium.Env:
        lake = generate_random_map(size=4, seed=number)
        return gymnasium.make(self.name, disable_env_checker=True, desc=lake, **self.options)

    env_of = make

    def show(self, env: Any, observation: Any) -> str:
        rows = [b"".join(row).decode() for row in env.desc]
        return _with_marker(rows, *divmod(int(observation), env.ncol))


class CliffWalking(TextTask):
    """The one cliff. Problems differ in what the environment draws, if `options` has `is_slippery`."""

    name = "CliffWalking-v1"
    rules = "You are @. Walk to G, and not into the cliff C. A turn is one of: up, right, down, left."
    actions = ("up", "right", "down", "left")

    def show(self, env: Any, observation: Any) -> str:
        rows = ["." * 12] * 3 + ["S" + "C" * 10 + "G"]
        return _with_marker(rows, *divmod(int(observation), 12))

    def score(self, rewards: list[float], *, terminated: bool) -> float:
        return float(terminated)


class Taxi(TextTask):
    """A passenger to be brought to one of four places."""

    name = "Taxi-v4"
    rules = "You drive the taxi @. A turn is one of: south, north, east, west, pickup, dropoff."
    actions = ("south", "north", "east", "west", "pickup", "dropoff")
    places = ("R", "G", "Y", "B")

    def show(self, env: Any, observation: Any) -> str:
        row, column, passenger, destination = (int(part) for part in env.decode(int(observation)))
        rows = [b"".join(line).decode() for line in env.desc]
        waits = f"waits at {self.places[passenger]}" if passenger < 4 else "is in the taxi"
        text = f"The passenger {waits} and wants to {self.places[destination]}."
        return f"{_with_marker(rows, row + 1, 2 * column + 1)}\n{text}"

    def score(self, rewards: list[float], *, terminated: bool) -> float:
        return float(terminated)


class Blackjack(TextTask):
    """A hand against a dealer: 1 for one that wins, a half for a draw."""

    name = "Blackjack-v1"
    rules = "Come nearer to 21 than the dealer, and not above. A turn is one of: stick, hit."
    actions = ("stick", "hit")

    def show(self, env: Any, observation: Any) -> str:
        total, dealer, ace = (int(part) for part in observation)
        return f"You have {total}{' with an ace as 11' if ace else ''}, and the dealer shows {dealer}."

    def score(self, rewards: list[float], *, terminated: bool) -> float:
        return min(1.0, (sum(rewards) + 1) / 2) if terminated else 0.0
