"""Play episodes with an engine, and play them again to check them (docs/spec/rollout.md).

The context of a turn is the concatenation of prompt, turns and replies. A reply's text becomes tokens once, and what
was said before is never written or read again.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Final

import torch

from protocol import limits
from protocol.encoding import REWARD_UNIT
from protocol.environments import Problem
from protocol.environments.base import EpisodeEnvironment, SandboxLimitError
from protocol.rollout.batch import Turn, join_turns
from protocol.rollout.sketch import SketchKey
from protocol.run import ChatSpec
from roles.policy.assignment import PolicyTask, Tokenizer
from roles.policy.sequences import Tokens
from roles.ports import Engine, EngineError, Generation, Request, TurnCache

AT_ONCE: Final = 128
"""Most episodes that are played at the same time, each of which may have a process of the sandbox."""

_STEPPED: Final = 16  # episodes that one call steps

MOST_LIMITS: Final = 2
"""How often the environment may reach a limit, which takes long; then the remaining episodes are not tried."""


def encode_reply(tokenizer: Tokenizer, chat: ChatSpec | None, text: str, most: int) -> Tokens:
    """Return at most `most` token ids of a reply with the text around it; the text behind it has the last ones."""
    before, after = ("", "") if chat is None else (chat.turn_before, chat.turn_after)
    text = text.encode(errors="replace")[: limits.MAX_REPLY_BYTES].decode(errors="ignore")
    end = tokenizer.encode(after, special=False)[:most] if after else ()
    return tokenizer.encode(before + text, special=False)[: most - len(end)] + end


class OpenEpisode:
    """An episode up to some turn, and the environment that replies, with the seed of its randomness."""

    def __init__(self, task: PolicyTask, problem: Problem, seed: bytes) -> None:
        rule, environment = task.run.episode_rule, task.environment
        assert rule is not None and isinstance(environment, EpisodeEnvironment)
        self._task = task
        self._rule = rule
        self._episode = environment.begin(problem, seed)
        self.tokens: Tokens = ()
        self.turns: tuple[Turn, ...] = ()
        self.room = self._rule.room(0, 0, 0)
        """The most tokens of the next turn; 0 at the end of the episode."""
        self.reward = 0
        """The environment's reward, in millionths, when the episode has ended."""

    def take(self, tokens: Tokens) -> Tokens:
        """Append a turn of the policy, and return the environment's reply to it; none at the end of the episode."""
        tokenizer, run = self._task.tokenizer, self._task.run
        answer = self._episode.step(tokenizer.decode(run.sampling.params().without_stop(tokens)))
        reply: Tokens = ()
        if answer is not None:
            reply = encode_reply(tokenizer, run.chat, answer, self._rule.reply_tokens)
        self.tokens += tokens
        total = len(self.tokens) + len(reply) + sum(len(earlier) for _, earlier in self.turns)
        self.room = 0 if answer is None else self._rule.room(len(self.turns) + 1, len(self.tokens), total)
        reply = reply if self.room else ()  # nobody reads a reply that no turn follows
        self.turns += ((len(tokens), reply),)
        if not self.room:
            self.reward = round(self._episode.reward() * REWARD_UNIT)
        return reply


def replayed_reward(episode: OpenEpisode, tokens: Tokens, turns: Sequence[Turn]) -> int | None:
    """Return the reward of a claimed episode, in millionths; None if the environment replies otherwise, or another turn
    is the last one.

    A turn is given to the environment only if all replies before it are the environment's own: only then did the policy
    write it in this episode.
    """
    begin = 0
    for count, reply in turns:
        if not episode.room or episode.take(tokens[begin : begin + count]) != reply:
            return None
        begin += count
    return None if episode.room else episode.reward


class PlayedEpisode:
    """An episode that an engine plays; with an empty seed it draws the most likely tokens.

    `begun` are the first tokens of its next turn, if only the reward of the episode is wanted. Then no hidden states
    are kept, and an episode in which the environment reaches a limit ends and `is_cut_off`, and raises no error.
    """

    def __init__(self, episode: OpenEpisode, prompt: Tokens, seed: bytes, begun: Tokens | None = None) -> None:
        self.episode = episode
        self.is_cut_off = False
        self._begun = begun or ()
        self._is_whole = begun is None
        self._prompt = prompt
        self._seed = seed
        self._cache = TurnCache()
        self._generations: list[Generation] = []

    @property
    def room(self) -> int:
        """The most tokens that the next turn still lacks; 0 at the end of the episode."""
        return 0 if self.is_cut_off else max(0, self.episode.room - len(self._begun))

    def request(self, key: SketchKey | None) -> Request:
        """Return the request of the next turn."""
        context = self._prompt + join_turns(self.episode.tokens, self.episode.turns)[0] + self._begun
        return Request(context, self._seed, key, len(self.episode.tokens) + len(self._begun), self._cache)

    def take(self, generation: Generation) -> None:
        """Append a turn; what is more than this episode has room for is cut off."""
        room = self.room
        if len(generation.tokens) > room:
            generation = Generation(
                generation.tokens[:room],
                generation.hidden[:room],
                generation.logprobs[:room],
                generation.sketch[: room * (len(generation.sketch) // len(generation.tokens))],
            )
        # Else nobody needs the states, which an evaluation would have of all its episodes at once.
        if self._seed and self._is_whole:
            self._generations.append(generation)
        try:
            self.episode.take(self._begun + generation.tokens)
        except SandboxLimitError:
            self.is_cut_off = True
            if self._is_whole:
                raise
        self._begun = ()
        if not self.room:
            self._cache.content = None

    @property
    def generation(self) -> Generation:
        """All turns together, of an episode with a seed."""
        parts = self._generations
        return Generation(
            self.episode.tokens,
            torch.cat([part.hidden for part in parts]),
            tuple(value for part in parts for value in part.logprobs),
            b"".join(part.sketch for part in parts),
        )


async def play(
    task: PolicyTask,
    engine: Engine,
    episodes: Sequence[PlayedEpisode],
    key: SketchKey | None = None,
    at_engine: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    at_environment: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
) -> None:
    """Play episodes to their ends with the policy that the engine serves now; those that wait for a turn are one batch.
    EngineError if the engine broke, or another version came to be served. For each turn, both reservations are entered
    one after the other.
    """
    version: int | None = None
    for start in range(0, len(episodes), AT_ONCE):
        while waiting := [item for item in episodes[start : start + AT_ONCE] if item.room]:
            # Noise depends on the position alone, so a turn that is cut off is the one that less room would have given.
            params = replace(task.run.sampling.params(), max_tokens=max(item.room for item in waiting))
            async with at_engine():
                version = engine.version if version is None else version
                turns = await engine.generate([item.request(key) for item in waiting], params)
                if engine.version != version:
                    raise EngineError("another version came to be served while episodes were played")
            async with at_environment():
                for place in range(0, len(waiting), _STEPPED):  # a deadline can end the play after so many
                    part = slice(place, place + _STEPPED)
                    limits = sum(item.is_cut_off for item in episodes)
                    await task.run_sync(_take_all, waiting[part], turns[part], limits)


def _take_all(episodes: Sequence[PlayedEpisode], turns: Sequence[Generation], limits: int) -> None:
    for episode, turn in zip(episodes, turns, strict=True):
        if limits < MOST_LIMITS:
            episode.take(turn)
            limits += episode.is_cut_off
        else:
            episode.is_cut_off = True
