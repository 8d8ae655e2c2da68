"""How long the turns of an episode may be, and where it ends (docs/spec/rollout.md).

A miner draws turns by this rule, and a validator checks their form by it before any other work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Turn = tuple[int, tuple[int, ...]]
"""The number of policy tokens of a turn, and the token ids of the environment's reply to it."""


@dataclass(frozen=True)
class EpisodeRule:
    """The lengths of a run's episodes: most turns, most tokens of a turn or reply, in all, and of the policy."""

    turns: int
    turn_tokens: int
    reply_tokens: int
    tokens: int
    max_tokens: int
    stops: tuple[int, ...]

    def room(self, turns: int, drawn: int, total: int) -> int:
        """Return the most policy tokens of the turn after so many turns, policy tokens and tokens; 0 if none."""
        if turns >= self.turns:
            return 0
        return max(0, min(self.turn_tokens, self.max_tokens - drawn, self.tokens - total))

    def is_complete(self, tokens: Sequence[int], turns: Sequence[Turn]) -> bool:
        """Return whether an episode has the form that sampling gives: each turn ends at its only stop token or has as
        many tokens as it may, each reply but the last is followed by a turn, and the last one is empty.
        """
        drawn = total = 0
        for number, (count, reply) in enumerate(turns):
            room, turn = self.room(number, drawn, total), tokens[drawn : drawn + count]
            if not 0 < count <= room or any(token in self.stops for token in turn[:-1]):
                return False
            if (turn[-1] not in self.stops and count < room) or len(reply) > self.reply_tokens:
                return False
            drawn, total = drawn + count, total + count + len(reply)
        return drawn == len(tokens) > 0 and not turns[-1][1]
