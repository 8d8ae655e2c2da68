"""Makes the zoo's policy and its descendants: `python -m tests.support.adversaries.trained_policy --out DIR` (about a
quarter of an hour on one core).

First a small Qwen3 learns the stories from a corpus; then it goes on by reinforcement as a run's trainer would (GRPO on
its own rollouts, FP32 masters, a BF16 view for every version). DIR holds a policy directory (version 0) and the
versions' weights; a second call finds them there.
"""

import argparse
import math
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
import trio
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from grailnode.engine import policy as policies
from grailnode.engine.causal_model import CausalModel
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from grailnode.engine.torch_engine import TorchEngine
from protocol.environments import Environment
from protocol.rollout.sampling import SamplingParams, log_probabilities
from roles.policy.sequences import PaddedBatch, pad
from roles.ports import Request
from roles.trainer.learn.learner import Learner, LearnerSettings, StepReport
from roles.trainer.learn.optimizer import AdamWSettings
from roles.trainer.verified_batch import VerifiedGroup
from tests.support.adversaries import stories
from tests.support.adversaries.harness import inline
from tests.support.adversaries.weight_changes import changed_share, keeping
from tests.support.builders.verified_batches import make_group

CACHE: Final = Path.home() / ".cache" / "grailnode" / "zoo"
"""Where the policy of the benches is kept."""

DRAFT: Final = "draft.safetensors"
"""A model of half the depth that was cut from version 0 and learned the stories anew, for a while."""

PARAMS: Final = SamplingParams(temperature=1.0, max_tokens=stories.LONGEST, eos=stories.EOS)


@dataclass(frozen=True)
class Recipe:
    """How the policy is made.

    Attributes:
        width, layers, heads, pairs, head_size, feed_forward: the transformer's numbers (pairs: key-value heads).
        steps, batch: optimizer steps of supervised training, stories in each.
        learning_rate: AdamW's, after a warm-up, falling as a cosine to a tenth.
        versions: reinforcement steps, a version each; groups: of `group_size` rollouts in each.
        reinforcement_rate: AdamW's learning rate in them.
    """

    width: int = 128
    layers: int = 6
    heads: int = 4
    pairs: int = 2
    head_size: int = 32
    feed_forward: int = 352
    steps: int = 3600
    batch: int = 8
    learning_rate: float = 2e-3
    warmup: int = 100
    versions: int = 50
    groups: int = 12
    group_size: int = 8
    reinforcement_rate: float = 3e-6

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "eos_token_id": stories.EOS,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "hidden_size": self.width,
            "initializer_range": 0.02,
            "intermediate_size": self.feed_forward,
            "max_position_embeddings": 256,
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.pairs,
            "pad_token_id": stories.PAD,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": stories.VOCABULARY,
        }

    def model(self) -> Qwen3:
        """The architecture."""
        config = Qwen3Config.of(self.config())
        assert config is not None
        return Qwen3(config)


def _batches(recipe: Recipe, seed: int) -> Iterator[PaddedBatch]:
    text = policies.Tokenizer(stories.tokenizer())
    source = stories.corpus(seed)
    while True:
        pairs = [next(source) for _ in range(recipe.batch)]
        yield pad([text.encode(prompt) for prompt, _ in pairs], [(*text.encode(t), stories.EOS) for _, t in pairs])


def _loss(model: Qwen3, weights: Mapping[str, Tensor], batch: PaddedBatch) -> Tensor:
    hidden = model.hidden(weights, batch.ids, batch.mask)[batch.rows, batch.columns]
    return functional.cross_entropy(model.logits(weights, hidden), batch.targets)


def _initial(model: Qwen3, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02)
        for name, shape in model.shapes.items()
    }


def supervise(recipe: Recipe, seed: int, start: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Supervised training from random weights or from these, with a line of progress now and then: BF16 tensors."""
    model = recipe.model()
    begin = start or _initial(model, seed)
    weights = {name: tensor.to(torch.float32, copy=True).requires_grad_() for name, tensor in begin.items()}
    optimizer = torch.optim.AdamW(weights.values(), betas=(0.9, 0.99), weight_decay=0.0)
    began, recent = time.monotonic(), 0.0
    for step, batch in zip(range(1, recipe.steps + 1), _batches(recipe, seed), strict=False):
        fall = 0.55 + 0.45 * math.cos(math.pi * step / recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, step / recipe.warmup) * fall
        loss = _loss(model, weights, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        recent += float(loss.detach())
        if step % 100 == 0 or step == recipe.steps:
            seconds = time.monotonic() - began
            print(
                f"step {step} of {recipe.steps}: loss {recent / (step % 100 or 100):.4f}, {seconds:.0f} s", flush=True
            )
            recent = 0.0
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}


def held_out_loss(recipe: Recipe, weights: Mapping[str, Tensor]) -> float:
    """Nats a completion token on stories that training did not see."""
    wide = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
    model, batches = recipe.model(), _batches(recipe, seed=-1)
    with torch.inference_mode():
        return sum(float(_loss(model, wide, next(batches))) for _ in range(20)) / 20


async def engine_of(model: Any, weights: Mapping[str, Tensor], version: int = 0, **options: Any) -> TorchEngine:
    """An engine that serves these weights."""
    engine = TorchEngine(model, run_sync=inline, **options)
    await engine.stage(version, dict(weights))
    await engine.commit()
    return engine


@dataclass(frozen=True)
class Task:
    """What is reinforced."""

    environment: Environment
    text: policies.Tokenizer
    params: SamplingParams


async def reinforce(
    model: CausalModel, start: Mapping[str, Tensor], task: Task, recipe: Recipe, seed: int
) -> AsyncIterator[tuple[StepReport, dict[str, Tensor]]]:
    """One version after another, each an optimizer step from rollouts of the one before."""
    optimizer = AdamWSettings(learning_rate=recipe.reinforcement_rate, warmup_steps=5)
    learner = Learner(model, start, LearnerSettings(optimizer=optimizer))
    weights = dict(start)
    for version in range(1, recipe.versions + 1):
        engine = await engine_of(model, weights)
        seeds = [sha256(f"{seed} {version} {group}".encode()).digest() for group in range(recipe.groups)]
        report = learner.step([await _group(engine, task, recipe.group_size, version, seed) for seed in seeds])
        weights = learner.bf16_view()
        yield report, weights


async def _group(engine: TorchEngine, task: Task, size: int, version: int, seed: bytes) -> VerifiedGroup:
    problem = task.environment.problem(seed)
    prompt, dice = task.text.encode(problem.prompt), random.Random(seed)
    done = await engine.generate([Request(prompt, dice.randbytes(16)) for _ in range(size)], task.params)
    completions = tuple(generation.tokens for generation in done)
    seen = await engine.forward([prompt] * size, completions)
    likely = [log_probabilities(f.logits, torch.tensor(t), 1.0) for f, t in zip(seen, completions, strict=True)]
    ended = [tokens[:-1] if tokens[-1] == task.params.eos else tokens for tokens in completions]
    rewards = tuple(task.environment.reward(problem, task.text.decode(tokens)) for tokens in ended)
    return make_group(seed, version - 1, prompt, completions, likely, rewards)


def _weights_file(directory: Path, version: int) -> Path:
    return directory / f"version-{version:03d}.safetensors"


def make(directory: Path, recipe: Recipe, seed: int) -> None:
    """Make what is missing in a directory."""
    if not (directory / "config.json").is_file():
        policies.save(directory, recipe.config(), stories.tokenizer(), supervise(recipe, seed))
    start = policies.load_weights(directory)
    print(f"version 0: held-out loss {held_out_loss(recipe, start):.4f} nats a token", flush=True)
    if not (directory / DRAFT).is_file():
        half = replace(recipe, layers=recipe.layers // 2, steps=recipe.steps // 12, learning_rate=1e-3)
        save_file(supervise(half, seed + 1, keeping(start, list(range(half.layers)))), directory / DRAFT)
    if not _weights_file(directory, recipe.versions).is_file():
        trio.run(_descend, directory, recipe, seed, start)
    newest = load_version(directory, recipe.versions)
    print(f"version {recipe.versions}: held-out loss {held_out_loss(recipe, newest):.4f} nats a token")


async def _descend(directory: Path, recipe: Recipe, seed: int, start: Mapping[str, Tensor]) -> None:
    task = Task(stories.Stories(), policies.Tokenizer(stories.tokenizer()), PARAMS)
    before, version = start, 0
    async for report, weights in reinforce(recipe.model(), start, task, recipe, seed):
        version += 1
        save_file(weights, _weights_file(directory, version))
        print(
            f"version {version} of {recipe.versions}: reward {report.mean_reward:.3f}, entropy {report.entropy:.3f}, "
            f"{changed_share(before, weights):.4f} of the weights changed",
            flush=True,
        )
        before = weights


def load_version(directory: Path, version: int) -> dict[str, Tensor]:
    """The weights of a version that `make` made."""
    return policies.load_weights(directory) if version == 0 else load_file(_weights_file(directory, version))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=CACHE)
    parser.add_argument("--seed", type=int, default=0)
    recipe = Recipe()
    for name, value in asdict(recipe).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    directory, seed = options.pop("out"), options.pop("seed")
    torch.set_num_threads(1)
    make(directory, Recipe(**options), seed)


if __name__ == "__main__":
    main()
