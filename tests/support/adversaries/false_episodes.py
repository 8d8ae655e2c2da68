"""Miners that falsify episodes. All but one let the true policy write every token, with the right noise, so that no
sketch and no margin shows them.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final

from protocol.environments.base import Episode
from protocol.judging.verdict import Reason
from protocol.rollout.sampling import SamplingParams
from roles.miner.produce import HonestProducer, MiningWindow
from roles.policy.assignment import Assignment, Task
from roles.ports import Engine, Generation, Request

FORGED: Final = "99+99="


@dataclass
class _FalseEpisode:
    """An episode whose replies a function falsifies, which gets the number of the turn, its text and the episode."""

    true: Episode
    reply: Callable[[int, str, Episode], str | None]
    turns: int = 0

    def step(self, text: str) -> str | None:
        self.turns += 1
        return self.reply(self.turns, text, self.true)

    def reward(self) -> float:
        return self.true.reward()


def _false_environment(true: Any, reply: Callable[[int, str, Episode], str | None]) -> Any:
    """Return a copy of an environment that replies as its miner likes."""
    false = copy(true)
    false.begin = lambda problem, seed: _FalseEpisode(true.begin(problem, seed), reply)
    return false


def _forge_reply(turn: int, text: str, episode: Episode) -> str | None:
    reply = episode.step(text)
    return FORGED if turn == 1 else reply


def _drop_turns(turn: int, text: str, episode: Episode) -> str | None:
    episode.step(text)
    return None


def _add_turn(turn: int, text: str, episode: Episode) -> str | None:
    return episode.step(text) or FORGED


def _own_tokens_as_reply(turn: int, text: str, episode: Episode) -> str | None:
    reply = episode.step(text)
    if turn > 1 or reply is None:
        return reply
    return f"{reply}12{episode.step('12') or FORGED}"  # its own answer to the reply, and what comes behind it


def _with_replies(reply: Callable[[int, str, Episode], str | None]) -> Callable[[Task, Engine], HonestProducer]:
    def make(task: Task, engine: Engine) -> HonestProducer:
        environment = _false_environment(task.environment, reply)
        return HonestProducer(replace(task, environment=environment), engine)

    return make


class _OtherSeeds(HonestProducer):
    """Plays with the environment's randomness of another group."""

    def assignments(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Assignment]:
        others = super().assignments(mining_window, [index + 1000 for index in indices])
        pairs = zip(super().assignments(mining_window, indices), others, strict=True)
        return [replace(item, episode_seeds=other.episode_seeds) for item, other in pairs]


class _SwappedReplies(HonestProducer):
    """Plays each episode with the replies that are another rollout's."""

    def assignments(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Assignment]:
        return [
            replace(item, episode_seeds=(*item.episode_seeds[1:], item.episode_seeds[0]))
            for item in super().assignments(mining_window, indices)
        ]


class _NoiseBegunAgain:
    """An engine that draws each turn with the noise of the first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        return await self._engine.generate([replace(request, offset=0) for request in requests], params)


def _begin_noise_again(task: Task, engine: Engine) -> HonestProducer:
    false: Any = _NoiseBegunAgain(engine)
    return HonestProducer(task, false)


CHEATS: Final[dict[str, tuple[Callable[[Task, Engine], HonestProducer], Reason]]] = {
    "forged-reply": (_with_replies(_forge_reply), Reason.TURN),
    "reply-of-another-seed": (_OtherSeeds, Reason.TURN),
    "dropped-turn": (_with_replies(_drop_turns), Reason.TURN),
    "added-turn": (_with_replies(_add_turn), Reason.TURN),
    "swapped-replies": (_SwappedReplies, Reason.TURN),
    "own-tokens-as-reply": (_with_replies(_own_tokens_as_reply), Reason.TURN),
    "noise-begun-again": (_begin_noise_again, Reason.SAMPLING),
}
"""The producer of each cheat, and the reason for which its groups are refused."""
