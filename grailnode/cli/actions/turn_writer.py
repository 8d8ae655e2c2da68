"""A policy that writes the turns of an episode, for `grailnode environments try --policy`."""

from pathlib import Path

import trio

from grailnode.engine.models import build
from grailnode.engine.policy import Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from protocol import limits
from protocol.rollout.sampling import SamplingParams
from roles.policy.episodes import encode_reply
from roles.ports import Request
from roles.trainer.tensor_shards import run_inline


class TurnWriter:
    """Takes the most likely tokens of the policy in a directory."""

    def __init__(self, directory: Path, prompt: str, max_tokens: int) -> None:
        policy = Policy.load(directory)
        # In this thread: another one that frees its last tensors while Python ends would abort the process.
        self._tokenizer, self._engine = policy.tokenizer, TorchEngine(build(policy), run_sync=run_inline)
        trio.run(self._engine.stage, 0, load_weights(directory))
        trio.run(self._engine.commit)
        self._params = SamplingParams(1.0, max_tokens, policy.stops)
        self._context = policy.tokenizer.encode(prompt)

    def turn(self) -> str:
        (turn,) = trio.run(self._engine.generate, [Request(self._context, b"")], self._params)
        self._context += turn.tokens
        return self._tokenizer.decode(self._params.without_stop(turn.tokens))

    def read(self, reply: str) -> None:
        """Append a reply to what the policy continues."""
        self._context += encode_reply(self._tokenizer, None, reply, limits.MAX_REPLY_TOKENS)
