"""Small policies with random weights: no answer is certain, so that a rounding error may change a token. The tokens of
speaking policies are whole phrases, so that they write solutions or attacks.
"""

import json
import random
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grailnode.calibration import proof_file
from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from protocol.digest import digest_weights
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from roles.ports import Request
from tests.support.builders import genesis

RECIPE = genesis.Recipe(width=32, layers=2, heads=4, key_value_heads=2, head_size=8, feed_forward=48)
PARAMS = SamplingParams(temperature=1.0, max_tokens=6, stops=(1,))
NOISE = 1e-4
"""Bound on the differences that the order of float32 additions causes here; measured: under 1e-5."""


def random_weights(model: CausalModel, seed: int = 0) -> dict[str, Tensor]:
    """Return BF16 weights with which logits vary by a few units."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)).to(torch.bfloat16)
        for name, shape in model.shapes.items()
    }


def write_policy(directory: Path, **changes: Any) -> Policy:
    """Write a policy directory with random weights; `changes` are keys of config.json."""
    _write_random_policy(directory, genesis.tokenizer(), RECIPE.config() | changes)
    return Policy.load(directory)


def _write_random_policy(directory: Path, tokenizer: str, config: dict[str, Any]) -> dict[str, Tensor]:
    genesis.save(directory, config, tokenizer, {})
    weights = random_weights(build(Policy.load(directory)))
    genesis.save(directory, config, tokenizer, weights)
    return weights


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result, computed in this task, so that a mock clock does not wait for it."""
    return function(*arguments)


async def engine_of(model: CausalModel, weights: dict[str, Tensor], **options: Any) -> TorchEngine:
    """Return an engine that serves these weights as version 0."""
    engine = TorchEngine(model, run_sync=inline, **options)
    await engine.stage(0, weights)
    await engine.commit()
    return engine


def run_without_waiting(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waited")


def requests_of_many_lengths(count: int = 24) -> list[Request]:
    """Return requests whose prompts have 1 to 11 tokens."""
    generator = random.Random(5)
    return [
        Request(tuple(generator.randrange(2, 22) for _ in range(generator.randrange(1, 12))), generator.randbytes(16))
        for _ in range(count)
    ]


_CHARACTERS = ("\n", *map(chr, range(32, 127)))
_PUSH = 4.0  # of every embedding in one direction, which the layers do not change
_QUIET = 0.05  # scale of what the layers add, so that the push remains larger
_LOUDNESS = 2.0  # of phrases in that direction; single characters have none


def write_speaking_policy(directory: Path, phrases: Sequence[str], chat_template: str = "") -> Policy:
    """Write a policy whose completions consist mostly of these phrases.

    Args:
        phrases: all different, of two characters or more.
        chat_template: of its tokenizer, whose first token is <pad> and whose last is <eos>; empty for none.
    """
    tokens = (*_CHARACTERS, *phrases)
    tokenizer = genesis.tokenizer(tokens, r"[\s\S]")
    vocabulary = len(genesis.SPECIAL) + len(tokens)
    changes = {"vocab_size": vocabulary, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    config = RECIPE.config() | changes
    weights = _write_random_policy(directory, tokenizer, config)
    weights["model.embed_tokens.weight"][:, 0] = _PUSH
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(_QUIET)[0] = 0.0
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][-len(phrases) :, 0] = _LOUDNESS
    genesis.save(directory, config, tokenizer, weights)
    proof = proof_file.read(PACKAGED_POLICY / proof_file.NAME)  # one engine at work is as far from itself on any policy
    if chat_template:
        special_tokens = {"bos_token": "<pad>", "eos_token": {"content": "<eos>"}}
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template, **special_tokens}))
    own_proof = {
        "chat": bool(chat_template),
        "policy": digest_weights(load_weights(directory)).hex(),
        "max_tokens": 512,
    }
    subject = proof.subject.model_copy(update=own_proof)
    (directory / proof_file.NAME).write_text(proof.model_copy(update={"subject": subject}).to_json())
    return Policy.load(directory)
