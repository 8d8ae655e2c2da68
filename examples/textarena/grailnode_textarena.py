"""TextArena's games for one player as episodes.

    pip install examples/textarena
    grailnode environments try textarena --environment-config '{"game": "Mastermind-v0"}' --answer '[1 2 3 4]'

The configuration may have `game` and `turns`. A problem is a seed, and its prompt what the game says first. TextArena
draws from the global generator of `random`, which belongs to one episode here, as each has a process of its own.
"""

import os
import random
from typing import Any

os.environ.setdefault("HOME", "/tmp")  # noqa: S108, where TextArena's library of words would keep files; none comes
import textarena
from textarena import ObservationType

# Those that start alone and without a network, give equal episodes in processes of different hash seeds, and raise no
# exception for a turn that is no move. The harder forms of each (`Mastermind-v0-hard`) are the same code. Each
# passes `environments check` with 200 seeds.
GAMES = (
    *("2048", "Bandit", "Blackjack", "Countdown", "FifteenPuzzle", "FrozenLake", "GuessTheNumber", "LightsOut"),
    *("LogicPuzzle", "Mastermind", "Minesweeper", "PegJump", "RushHour", "Secretary", "Set", "Slitherlink"),
    *("Sudoku", "ThreeCardMonte", "TowerOfHanoi"),
)

FLOORS = {"2048": 0.001, "PegJump": 0.072}
"""The most that a game gives to an episode without a move. A reward up to this is none; of other games, up to 0."""

REFUSED = {
    "Crosswords": "it takes the letters of a turn in the order of a set, which differs between processes",
    "Cryptarithm": "it has one puzzle alone",
    "Sokoban": "it needs numpy, which TextArena does not require",
    **dict.fromkeys(("MarketEntryGame", "PublicGoodsGame"), "it is for several players"),
    **dict.fromkeys(("QuantumTicTacToe", "SpiteAndMalice"), "it is for two players, both of which the policy would be"),
}
"""Why other games that start with one player are refused. All others need several, a download or a model."""


class TextArena:
    """One game, with a problem for each seed."""

    exact = True
    held_out_size = 500

    def __init__(self, config: dict[str, Any]) -> None:
        self.game, self.turns = config.get("game", "Mastermind-v0"), config.get("turns", 20)
        if (name := self.game.partition("-")[0]) not in GAMES:
            raise ValueError(f"{self.game}: {REFUSED.get(name, 'none of ' + ', '.join(GAMES))}")
        Game(self.game, 0)  # imports what the game needs, once for all episodes

    def problem(self, seed: bytes) -> dict[str, Any]:
        return self._of(2 * random.Random(seed).randrange(1 << 30))

    def held_out_problem(self, index: int) -> dict[str, Any]:
        return self._of(2 * index + 1)

    def _of(self, number: int) -> dict[str, Any]:
        return {"prompt": Game(self.game, number).text, "reference": number}

    def begin(self, problem: dict[str, Any], seed: bytes) -> "Game":
        game = Game(self.game, problem["reference"])
        random.seed(seed)
        return game


class Game:
    """One episode. The reward is the game's own, which is negative for a turn that breaks its rules."""

    def __init__(self, game: str, number: int) -> None:
        random.seed(number)  # Countdown draws its problem before it gets the seed
        self.floor = FLOORS.get(game.partition("-")[0], 0.0)
        self.env, self.result = textarena.make(f"{game}-raw"), 0.0
        self.env.reset(num_players=1, seed=number)
        self.text = self._news()

    def _news(self) -> str:
        """Return what the game has said since the last turn."""
        _, messages = self.env.get_observation()
        return "".join(f"{text}\n" for _, text, kind in messages if kind is not ObservationType.PLAYER_ACTION)

    def step(self, text: str) -> str | None:
        is_over, _ = self.env.step(action=text if "[" in text else f"[{text}]")
        if is_over:
            rewards, _ = self.env.close()
            # Where a turn is no move, some games give its text in the place of the reward.
            self.result = rewards[0] if isinstance(rewards[0], int | float) else 0.0
            return None
        return self._news()

    def reward(self) -> float:
        return min(1.0, self.result) if self.result > self.floor else 0.0
