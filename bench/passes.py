"""Tokens that a training step computes, by how its rollouts are divided into passes: `python -m bench.passes [STORE]`.

For each spread of lengths, and for the groups in the store of a run: the share of pads, the passes, and what a step
costs, in tokens, with a pass at 128 beside its own. On several ranks that is the largest pass of each turn. The ways:
`full`, passes that are as large as they may be; `cost`, those of the trainer (roles/policy/sequences.py); `packed`,
those with `[trainer] packing`, one row without pads in each pass. `--policy DIRECTORY`: the CPU
seconds of a step with and without packing, and how far their gradients are apart.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import torch

from grailnode.engine.models import build
from grailnode.engine.policy import Policy, load_weights
from protocol import limits
from protocol.compression import decompress
from protocol.identity.signing import Envelope
from protocol.rollout.batch import Commitment, Group
from roles.policy.sequences import split, split_for_training, split_packed
from roles.trainer.learn.learner import Learner, LearnerSettings
from tests.support.processes.ranks import group

_STEPS: Final = 20
_PASS_TOKENS: Final = 128

Lengths = list[int]


def _uniform(draw: random.Random, count: int, longest: int) -> Lengths:
    return [draw.randint(60, longest) for _ in range(count)]


def _log_uniform(draw: random.Random, count: int, longest: int) -> Lengths:
    return [round(math.exp(draw.uniform(math.log(60), math.log(longest)))) for _ in range(count)]


def _groups(store: Path) -> Iterator[tuple[int, Lengths]]:
    """Yield the length of the prompt of each group of unequal rewards in a local store, and those of its rollouts with
    it.
    """
    for path in sorted(store.glob("*/commitments/*")):
        commitment = Commitment.from_bytes(Envelope.from_bytes(path.read_bytes()).body)
        for batch in store.glob(f"*/batches/*{commitment.batch.hex()}*"):
            data = batch.read_bytes()
            for index in range(len(commitment.groups)):
                offset, size = commitment.extent(index)
                group = Group.from_bytes(decompress(data[offset : offset + size], limits.MAX_GROUP_BYTES))
                if len({rollout.reward for rollout in group.rollouts}) > 1:
                    prompt = len(group.prompt_tokens)
                    yield prompt, [prompt + len(rollout.sequence) for rollout in group.rollouts]


def _cost(sizes: Sequence[int], ranks: int) -> int:
    return sum(max(sizes[begin : begin + ranks]) + _PASS_TOKENS for begin in range(0, len(sizes), ranks))


def _measure(name: str, steps: Sequence[Lengths], max_tokens: int, ranks: int) -> None:
    """Print a line: pads and passes of each way, and its cost over that of full passes."""
    costs, texts = [], []
    for way in ("full", "cost", "packed"):
        sizes = [_sizes(way, lengths, max_tokens, ranks) for lengths in steps]
        costs.append(sum(_cost(own, ranks) for own in sizes))
        pads = 1 - sum(map(sum, steps)) / sum(map(sum, sizes))
        texts.append(f"{pads:6.1%} {sum(map(len, sizes)) / len(steps):5.1f} {costs[-1] / costs[0]:5.2f}")
    print(f"{name:<28} {max_tokens:>6} {ranks:>5}   {'   '.join(texts)}")


def _sizes(way: str, lengths: Lengths, max_tokens: int, ranks: int) -> list[int]:
    if way == "packed":
        return [sum(lengths[index] for index in row) for row in split_packed(lengths, max_tokens, ranks)]
    batches = split(lengths, max_tokens) if way == "full" else split_for_training(lengths, max_tokens, ranks)
    return [len(batch) * lengths[batch[-1]] for batch in batches]


def _time(directory: Path, rollouts: int, longest: int) -> None:
    """Print the CPU seconds of the gradients of rollouts of 8 to `longest` random tokens, padded and packed in turn."""
    torch.set_num_threads(1)
    model, weights, draw = build(Policy.load(directory), recompute=True), load_weights(directory), random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, min(60, model.vocabulary)) for _ in range(count))

    groups = []
    for name in range(rollouts // 8):
        completions = [tokens(draw.randint(8, longest)) for _ in range(8)]
        groups.append(group(name, prompt=tokens(30), completions=completions, rewards=[0.0, 1.0] * 4))
    learners = [Learner(model, weights, LearnerSettings(packing=packing)) for packing in (False, True)]
    times: tuple[list[float], list[float]] = [], []
    for _ in range(3):
        gradients = []
        for learner, own in zip(learners, times, strict=True):
            begin = time.process_time()
            gradients.append(learner.gradients(groups).tensors)
            own.append(time.process_time() - begin)
    padded, packed = map(statistics.median, times)
    apart = math.hypot(*(float((one - gradients[1][name]).norm()) for name, one in gradients[0].items()))
    norm = math.hypot(*(float(one.norm()) for one in gradients[0].values()))
    times_text = f"padded {padded:.2f} s, packed {packed:.2f} s: {packed / padded:.2f}"
    print(f"{times_text}; the norm of the gradients' difference is {apart / norm:.1e} of theirs")


def main() -> None:
    """Print a line for each spread, bound of a pass, and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, nargs="?", help="directory of a run's store, as `grailnode demo` leaves it")
    parser.add_argument("--groups", type=int, default=16, help="groups of a step, for a store")
    parser.add_argument("--policy", type=Path, help="a checkpoint whose steps are timed instead")
    parser.add_argument("--rollouts", type=int, default=16, help="of a timed step")
    parser.add_argument("--longest", type=int, default=120, help="tokens of a rollout of a timed step")
    options = parser.parse_args()
    if options.policy is not None:
        _time(options.policy, options.rollouts, options.longest)
        return
    spreads: list[tuple[str, Callable[[random.Random], Lengths]]] = [
        ("128, uniform, 60 to 512", lambda draw: _uniform(draw, 128, 512)),
        ("128, log-uniform, 60 to 4096", lambda draw: _log_uniform(draw, 128, 4096)),
        ("16, log-uniform, 60 to 4096", lambda draw: _log_uniform(draw, 16, 4096)),
    ]
    if options.store is not None:
        prompts, groups = zip(*_groups(options.store), strict=True)
        repeated = sum(prompt * (len(lengths) - 1) for prompt, lengths in zip(prompts, groups, strict=True))
        print(f"{repeated / sum(map(sum, groups)):.1%} of all tokens repeat the prompt of a group")
        spreads = [(options.store.parent.parent.name, lambda draw: [*chain(*draw.sample(groups, options.groups))])]
    print(f"{'lengths':<28} {'bound':>6} ranks   {'   '.join(f'{way:<18}' for way in ('full', 'cost', 'packed'))}")
    for name, spread in spreads:
        draw = random.Random(0)
        steps = [spread(draw) for _ in range(_STEPS)]
        for max_tokens in (8192, 32_768):
            for ranks in (1, 2, 4):
                _measure(name, steps, max_tokens, ranks)


if __name__ == "__main__":
    main()
