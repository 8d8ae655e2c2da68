"""An environment of episodes for tests: its replies come from the seed, the number of the turn and the turn's text."""

from protocol.environments.base import Problem
from protocol.environments.seeded_rng import DrawnProblems, SeededRng


class DiceEpisode:
    """An episode that asks for one sum after another, and ends at random."""

    def __init__(self, seed: bytes, steps: list[tuple[bytes, str]]) -> None:
        self._seed = seed
        self._steps = steps
        self._texts: list[str] = []

    def step(self, text: str) -> str | None:
        self._steps.append((self._seed, text))
        self._texts.append(text)
        rng = SeededRng("dice", self._seed + repr(self._texts).encode())
        a, b = rng.between(10, 99), rng.between(10, 99)
        return f"{a}+{b}=" if rng.below(4) else None

    def reward(self) -> float:
        return SeededRng("dice reward", repr(self._texts).encode()).below(5) / 4


class Dice(DrawnProblems):
    """Sums whose answers do not matter. `steps` lists the seed and the text of each turn that was given to it."""

    name = "dice"
    turns = 6

    def __init__(self) -> None:
        self.steps: list[tuple[bytes, str]] = []

    def draw(self, rng: SeededRng) -> Problem:
        a, b = rng.between(10, 99), rng.between(10, 99)
        return Problem(prompt=f"{a}+{b}=", reference=f"{a} {b}")

    def begin(self, problem: Problem, seed: bytes) -> DiceEpisode:
        return DiceEpisode(seed, self.steps)

    def reward(self, problem: Problem, completion: str) -> float:
        episode = self.begin(problem, b"")
        episode.step(completion)
        return episode.reward()
