"""Trains the policy of the adversaries' benchmarks, and its versions.

    python -m bench.proofs.trained_policy --out DIR

takes about a quarter of an hour on one core. First a small Qwen3 learns the stories of a corpus; then it is reinforced
as by a run's trainer (GRPO on its own rollouts, FP32 master weights, a BF16 view for every version). DIR gets a policy
directory (version 0) and the weights of the versions; a second call makes only what is missing.
"""

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import trio
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from bench.proofs import trading_task
from grailnode.engine import policy as policies
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from protocol.rollout.sampling import SamplingParams
from roles.policy.sequences import TokenBatch, to_batch
from tests.support.adversaries.reinforcement import ReinforcementTask, reinforce
from tests.support.adversaries.weight_changes import changed_share, keep_layers
from tests.support.builders import genesis

CACHE: Final = Path.home() / ".cache" / "grailnode" / "adversaries"
"""The directory of the benchmarks' policy."""

DRAFT: Final = "draft.safetensors"
"""A model with half of the layers of version 0, trained on the stories for a twelfth of the steps."""

PARAMS: Final = SamplingParams(temperature=1.0, max_tokens=trading_task.MAX_STORY_TOKENS, stops=(trading_task.EOS,))


@dataclass(frozen=True)
class Recipe:
    """The sizes and the training of the policy.

    Attributes:
        width, layers, heads, pairs, head_size, feed_forward: sizes of the transformer (pairs: key-value heads).
        steps, batch: optimizer steps of supervised training, and stories in each.
        learning_rate: AdamW's after the warm-up; a cosine reduces it to a tenth.
        warmup: steps of the warm-up.
        versions: reinforcement steps, with a version each.
        groups, group_size: groups of a reinforcement step, and rollouts of a group.
        reinforcement_rate: AdamW's learning rate in reinforcement.
    """

    width: int = 128
    layers: int = 6
    heads: int = 4
    pairs: int = 2
    head_size: int = 32
    feed_forward: int = 352
    steps: int = 1500
    batch: int = 8
    learning_rate: float = 2e-3
    warmup: int = 100
    versions: int = 50
    groups: int = 12
    group_size: int = 8
    reinforcement_rate: float = 3e-6

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        sizes = genesis.Recipe(
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            key_value_heads=self.pairs,
            head_size=self.head_size,
            feed_forward=self.feed_forward,
        )
        tokens = {"eos_token_id": trading_task.EOS, "pad_token_id": trading_task.PAD}
        return sizes.config() | tokens | {"vocab_size": trading_task.VOCABULARY}

    def model(self) -> Qwen3:
        """Return the model."""
        config = Qwen3Config.of(self.config())
        assert config is not None
        return Qwen3(config)


def _batches(recipe: Recipe, seed: int) -> Iterator[TokenBatch]:
    text = policies.Tokenizer(trading_task.tokenizer())
    pairs_source = trading_task.corpus(seed)
    while True:
        pairs = [next(pairs_source) for _ in range(recipe.batch)]
        yield to_batch(
            [text.encode(prompt) for prompt, _ in pairs], [(*text.encode(t), trading_task.EOS) for _, t in pairs]
        )


def _loss(model: Qwen3, weights: Mapping[str, Tensor], batch: TokenBatch) -> Tensor:
    hidden = model.hidden(weights, batch.ids, batch.mask)[batch.rows, batch.columns]
    return functional.cross_entropy(model.logits(weights, hidden), batch.targets)


def _initial_weights(model: Qwen3, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02)
        for name, shape in model.shapes.items()
    }


def supervise(recipe: Recipe, seed: int, start: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Train by supervision from random weights or from `start`, print progress, and return BF16 weights."""
    model = recipe.model()
    first_weights = start or _initial_weights(model, seed)
    weights = {name: tensor.to(torch.float32, copy=True).requires_grad_() for name, tensor in first_weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), betas=(0.9, 0.99), weight_decay=0.0)
    start_time, loss_sum = time.monotonic(), 0.0
    for step, batch in zip(range(1, recipe.steps + 1), _batches(recipe, seed), strict=False):
        decay = 0.55 + 0.45 * math.cos(math.pi * step / recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, step / recipe.warmup) * decay
        loss = _loss(model, weights, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        loss_sum += float(loss.detach())
        if step % 100 == 0 or step == recipe.steps:
            seconds = time.monotonic() - start_time
            print(
                f"step {step} of {recipe.steps}: loss {loss_sum / (step % 100 or 100):.4f}, {seconds:.0f} s", flush=True
            )
            loss_sum = 0.0
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}


def held_out_loss(recipe: Recipe, weights: Mapping[str, Tensor]) -> float:
    """Return the loss on stories outside the training data, in nats a completion token."""
    float32_weights = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
    model, batches = recipe.model(), _batches(recipe, seed=-1)
    with torch.inference_mode():
        return sum(float(_loss(model, float32_weights, next(batches))) for _ in range(20)) / 20


def _weights_file(directory: Path, version: int) -> Path:
    return directory / f"version-{version:03d}.safetensors"


def make_policy(directory: Path, recipe: Recipe, seed: int) -> None:
    """Make the files that a directory lacks."""
    if not (directory / "config.json").is_file():
        genesis.save(directory, recipe.config(), trading_task.tokenizer(), supervise(recipe, seed))
    start = policies.load_weights(directory)
    print(f"version 0: held-out loss {held_out_loss(recipe, start):.4f} nats a token", flush=True)
    if not (directory / DRAFT).is_file():
        half = replace(recipe, layers=recipe.layers // 2, steps=recipe.steps // 12, learning_rate=1e-3)
        save_file(supervise(half, seed + 1, keep_layers(start, list(range(half.layers)))), directory / DRAFT)
    if not _weights_file(directory, recipe.versions).is_file():
        trio.run(_reinforce_versions, directory, recipe, seed, start)
    newest = load_version(directory, recipe.versions)
    print(f"version {recipe.versions}: held-out loss {held_out_loss(recipe, newest):.4f} nats a token")


async def _reinforce_versions(directory: Path, recipe: Recipe, seed: int, start: Mapping[str, Tensor]) -> None:
    task = ReinforcementTask(
        trading_task.TradingTask(),
        policies.Tokenizer(trading_task.tokenizer()),
        PARAMS,
        recipe.groups,
        recipe.group_size,
        recipe.reinforcement_rate,
    )
    previous_weights, version = start, 0
    async for report, weights in reinforce(recipe.model(), start, task, recipe.versions, seed):
        version += 1
        save_file(weights, _weights_file(directory, version))
        print(
            f"version {version} of {recipe.versions}: reward {report.reward:.3f}, entropy {report.entropy:.3f}, "
            f"{changed_share(previous_weights, weights):.4f} of the weights changed",
            flush=True,
        )
        previous_weights = weights


def load_version(directory: Path, version: int) -> dict[str, Tensor]:
    """Return the weights of a version that `make_policy` made."""
    return policies.load_weights(directory) if version == 0 else load_file(_weights_file(directory, version))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=CACHE)
    parser.add_argument("--seed", type=int, default=0)
    recipe = Recipe()
    for name, value in asdict(recipe).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    directory, seed = options.pop("out"), options.pop("seed")
    torch.set_num_threads(1)
    make_policy(directory, Recipe(**options), seed)


if __name__ == "__main__":
    main()
