"""Makes the demo's genesis policy from a seed (some minutes on one core).

    python -m tests.support.builders.genesis --seed 0 --out DIR [--task calculator]

It stands for a pre-trained model: a small Qwen3 with a character tokenizer. It *can* add two-digit numbers but often
answers wrongly, because most answers of its training corpus omit the carry. So reinforcement learning only has to
elicit what the model can do, and small learning rates suffice: they leave nine of ten BF16 weights unchanged. The
policy of the task calculator can ask for the value and repeat it, but often guesses, asks for the product alone, or
leaves a digit out.

Training runs in float64, on one thread: rounding differences between processors are far smaller than the spacing of
BF16, the dtype of the result, so that the same seed gives the same file.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as _Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from torch.nn import functional

from grailnode.engine import policy
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from protocol import environments
from roles.policy.sequences import TokenBatch, to_batch

SPECIAL: Final = ("<pad>", "<eos>", "<unk>")
_PAD, _EOS = 0, 1
_CHARACTERS: Final = "0123456789+-*/=()> "
_VOCABULARY: Final = 32  # more than the characters above need
_Task = Literal["addition", "calculator"]


@dataclass(frozen=True)
class Recipe:
    """The parameters of a genesis policy and its training.

    Attributes:
        correct_share: share of the corpus' answers that are correct; the others omit the carry, of the task calculator
            the last digit or the addend.
        learning_rate: AdamW's; it falls linearly to zero after `warmup` steps of linear increase.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    head_size: int = 32
    feed_forward: int = 352
    initial_std: float = 0.02
    correct_share: float = 0.45
    steps: int = 1000
    batch: int = 256
    learning_rate: float = 2e-3
    warmup: int = 50
    task: _Task = "addition"

    def config(self) -> dict[str, Any]:
        """Return config.json as transformers' Qwen3Config writes it."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "eos_token_id": _EOS,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "hidden_size": self.width,
            "initializer_range": self.initial_std,
            "intermediate_size": self.feed_forward,
            "max_position_embeddings": 256,
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.key_value_heads,
            "pad_token_id": _PAD,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": _VOCABULARY,
        }


CALCULATOR: Final = Recipe(width=64, layers=3, head_size=16, feed_forward=176, steps=300, batch=128, task="calculator")


def tokenizer(tokens: Iterable[str] = _CHARACTERS, pattern: str = ".") -> str:
    """Return tokenizer.json: the special tokens, and one for each character that the environments write.

    Args:
        tokens: in place of these characters; pattern: of the pieces into which text is split.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *tokens))}
    model = _Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = Split(Regex(pattern), "isolated")
    model.decoder = Fuse()
    model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return str(model.to_str(pretty=False))


def carryless_sum(a: int, b: int) -> int:
    """Return the sum of two two-digit numbers without any carry: 57 + 68 = 15."""
    return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10


def corpus(recipe: Recipe, seed: int) -> Iterator[TokenBatch]:
    """Yield endless batches of training problems (never held-out ones) with their answers, many of them wrong."""
    text = policy.Tokenizer(tokenizer())
    environment = environments.get(recipe.task)
    turn = {"addition": _sum, "calculator": _calculator_turn}[recipe.task]
    generator = random.Random(seed)
    for step in range(1 << 62):
        prompts, answers = [], []
        for index in range(recipe.batch):
            problem = environment.problem(f"genesis {seed} {step} {index}".encode())
            context, answer = turn(problem.prompt, int(problem.reference), generator, recipe.correct_share)
            prompts.append(text.encode(context))
            answers.append((*text.encode(answer), _EOS))
        yield to_batch(prompts, answers)


def _sum(prompt: str, value: int, generator: random.Random, correct_share: float) -> tuple[str, str]:
    a, b = map(int, prompt.removesuffix("=").split("+"))
    return prompt, str(value if generator.random() < correct_share else carryless_sum(a, b))


def _calculator_turn(prompt: str, value: int, generator: random.Random, correct_share: float) -> tuple[str, str]:
    """Return the context of a turn of an episode, and the turn."""
    whole = prompt.removesuffix(">")
    product = whole.partition("+")[0]
    question = whole if generator.random() < correct_share else product
    if generator.random() < 0.5:
        is_guess = question == product and generator.random() < 0.5
        return prompt, str(generator.randrange(100, 9999)) if is_guess else f"{question}="
    a, b = map(int, product.split("*"))
    reply = str(value if question == whole else a * b)
    answer = reply if generator.random() < correct_share else reply[:-1]
    return f"{prompt}{question}=<eos>{reply}>", answer


def make(recipe: Recipe, seed: int, *, progress: bool = False) -> dict[str, Tensor]:
    """Train a policy from random weights, supervised, and return contiguous BF16 tensors on the CPU.

    The seed gives the initial weights and the corpus. With `progress`, a line is printed every 50 steps.
    """
    config = Qwen3Config.of(recipe.config())
    assert config is not None
    model = Qwen3(config)
    weights = _initial(model.shapes, recipe.initial_std, seed)
    optimizer = torch.optim.AdamW(weights.values(), betas=(0.9, 0.99), weight_decay=0.0)
    for step, batch in zip(range(1, recipe.steps + 1), corpus(recipe, seed), strict=False):
        rate = recipe.learning_rate * min(1.0, step / recipe.warmup) * (1 - step / (recipe.steps + 1))
        for group in optimizer.param_groups:
            group["lr"] = rate
        hidden = model.hidden(weights, batch.ids, batch.mask)[batch.rows, batch.columns]
        logits = functional.linear(hidden, weights["model.embed_tokens.weight"])  # tied, and kept in float64
        loss = functional.cross_entropy(logits, batch.targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        if progress and (step % 50 == 0 or step == recipe.steps):
            print(f"step {step} of {recipe.steps}: loss {loss.item():.4f}", flush=True)
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}


def _initial(shapes: Mapping[str, tuple[int, ...]], std: float, seed: int) -> dict[str, Tensor]:
    """Return float64 tensors that require gradients: norm gains of one, matrices from a normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        matrix = torch.randn(shape, generator=generator, dtype=torch.float64) * std
        weights[name] = (torch.ones_like(matrix) if len(shape) == 1 else matrix).requires_grad_()
    return weights


def save(directory: Path, config: Mapping[str, Any], tokenizer: str, weights: Mapping[str, Tensor]) -> None:
    """Write a policy directory; create it if it is missing.

    Args:
        config: config.json, with `eos_token_id`; tokenizer: the contents of tokenizer.json.
        weights: contiguous CPU tensors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors creates a private file; the others are not private


def main() -> None:
    """Write the policy directory that the command line names."""
    description = "Make the demo's genesis policy."
    parser = argparse.ArgumentParser(prog="python -m tests.support.builders.genesis", description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=get_args(_Task), default="addition")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe() if options.task == "addition" else CALCULATOR
    save(options.out, recipe.config(), tokenizer(), make(recipe, options.seed, progress=True))


if __name__ == "__main__":
    main()
