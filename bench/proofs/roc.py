"""Table (c): the smallest change of a policy that is detected, and after how many tokens.

A line has the share of weights that differ, of positions beyond the tolerance and of tokens beyond the margin, the
share of groups that are refused by themselves, then the tokens until the miner is refused if the groups
are one window that grows (`tokens`) and if each is a window of its own (`history`), as medians over shuffled orders. A
dash means that the miner is not refused within all the groups.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bench.proofs.honest import describe
from bench.proofs.profiles import Profile, select
from bench.proofs.setting import TEST_SEED, Setting
from bench.proofs.sides import Pair
from grailnode.calibration.copies import quantized
from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.thresholds import beyond, is_refused
from protocol.judging.evidence import Counts, history_surprisal, surprisal_threshold, window_surprisal
from protocol.proof import Thresholds
from protocol.rollout import challenge, sampling
from roles.ports import Request
from tests.support.adversaries.weight_changes import changed_share
from tests.support.builders.proofs import windows_of

_ORDERS = 50
_WINDOW_TOKENS = 6000  # of the windows of edited tokens, which table (b) has as well
_SPACINGS = (6_000, 24_000, 100_000, 400_000)
_MIXED_BITS = ((8, 4), (4, 3), (3, 2))


def perturb(weights: Mapping[str, Tensor], relative: float, seed: int = 0) -> dict[str, Tensor]:
    """Return the weights, each multiplied by 1 plus normal noise of this standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor * (1 + relative * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def _mixed_bits(weights: Mapping[str, Tensor], more: int, fewer: int) -> dict[str, Tensor]:
    """Return weights of which every other matrix has fewer bits."""
    high, low = quantized(weights, more), quantized(weights, fewer)
    return {name: (low if place % 2 else high)[name] for place, name in enumerate(sorted(weights))}


def format_count(count: float | None) -> str:
    """Return a number of tokens, or a dash for none."""
    return "-" if count is None else f"{count:.0f}"


def _copies(setting: Setting) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    weights = setting.weights
    for bits in range(8, 1, -1):
        yield f"{bits}-bit weights", quantized(weights, bits)
    for more, fewer in _MIXED_BITS:
        yield f"{more}- and {fewer}-bit weights", _mixed_bits(weights, more, fewer)
    for age in (1, 2, 5, 10, 20, 50):
        yield f"{age} versions old", setting.version(setting.newest - age)
    for relative in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2):
        yield f"weights off by {relative:g}", perturb(weights, relative)


def tokens_until_refusal(
    groups: list[GroupMeasurement], spec: Thresholds, *, separate_windows: bool, orders: int = _ORDERS
) -> float | None:
    """Return the tokens until a miner is refused, as the median over shuffled orders of its groups.

    Args:
        groups: the groups.
        spec: the thresholds.
        separate_windows: whether each group is a window of its own; else they are one window that grows.
        orders: how many.

    Returns:
        None if the miner is not refused in half of the orders or more.
    """
    evidences = [group.weigh(spec) for group in groups]
    generator, tokens_needed = np.random.default_rng(0), []
    for _ in range(orders):
        counts: list[Counts] = []
        for index in generator.permutation(len(evidences)):
            evidence = evidences[index]
            counts.append(evidence.counts)
            surprisal = (
                history_surprisal(windows_of(counts, spec)) if separate_windows else window_surprisal(counts, spec)
            )
            if is_refused(evidence, spec) or surprisal > surprisal_threshold(spec):
                tokens_needed.append(sum(count.tokens for count in counts))
                break
    return float(np.median(tokens_needed)) if len(tokens_needed) > orders // 2 else None


async def table(setting: Setting, groups: int, only: str) -> None:
    """Print the table for each profile whose name contains `only`.

    Args:
        setting: the policy and the folder of results.
        groups: groups of each changed policy.
        only: part of a profile's name; empty for all.
    """
    for profile in select(only):
        row = await profile.thresholds(setting)
        print(f"{profile.name}: {describe(row)}")
        print(f"{'change':26} {'weights':>8} {'off':>9} {'margins':>9}  {'groups':>7} {'tokens':>7} {'history':>7}")
        for label, copy in _copies(setting):
            pair = Pair(replace(profile.plain, weights=lambda _, copy=copy: copy), profile.plain)  # type: ignore[misc]
            measured = (await setting.measure(profile.name, {label: pair}, {label: groups}, TEST_SEED))[label]
            print(f"{label:26} {changed_share(setting.weights, copy):8.4f}{_columns(measured, row)}", flush=True)
        await edits(setting, profile, row)


def _columns(measured: list[GroupMeasurement], row: Thresholds) -> str:
    distances = np.concatenate([group.fresh for group in measured])
    margins = np.concatenate([group.margins for group in measured])
    refused = np.mean([is_refused(group.weigh(row), row) for group in measured])
    window, history = (
        format_count(tokens_until_refusal(measured, row, separate_windows=separate)) for separate in (False, True)
    )
    off, margin = beyond(distances, row.sketch_tolerance).mean(), beyond(margins, row.margin).mean()
    return f" {off:9.5f} {margin:9.5f}  {refused:7.2f} {window:>7} {history:>7}"


async def edits(setting: Setting, profile: Profile, row: Thresholds) -> None:
    """Print how often a single token can be replaced by the runner-up without detection."""
    task = setting.task(TEST_SEED)
    engine = await profile.plain.serve(setting.policy, setting.weights, 0)
    gaps: list[np.ndarray] = []
    for number in range(24):
        seed = challenge.group_seed(bytes(32), 0, b"edits".ljust(32), bytes(32), number)
        prompt = setting.policy.tokenizer.encode(task.prompt(seed))
        requests = [Request(prompt, challenge.rollout_seed(seed, index)) for index in range(16)]
        generations = await engine.generate(requests, task.params)
        forwards = await engine.forward([prompt] * len(generations), [item.tokens for item in generations])
        for request, item, forward in zip(requests, generations, forwards, strict=True):
            words = sampling.seed_words([request.seed]).expand(len(item.tokens), 4)
            logits = forward.logits
            scores = logits + sampling.noise(words, torch.arange(len(item.tokens)), logits.shape[-1])
            best = scores.topk(2, dim=-1).values
            gaps.append((best[:, 0] - best[:, 1]).numpy())
    all_gaps = np.concatenate(gaps)
    print(f"one token replaced by the runner-up, {len(all_gaps)} positions; quantiles of its margin:", end="")
    print("".join(f"  {q:g}: {np.quantile(all_gaps, q):.3g}" for q in (1e-3, 1e-2, 0.1, 0.5)))
    print(
        f"beyond the margin limit {row.margin_limit:.2g}, so that this token alone refuses its group, at "
        f"{(all_gaps > row.margin_limit).mean():.5f} of the positions; "
        f"no miss at {(all_gaps <= row.margin).mean():.5f}"
    )
    if row.far_margin < row.margin_limit:
        windows = (Counts(_WINDOW_TOKENS, _WINDOW_TOKENS, far_rollouts=far) for far in itertools.count(1))
        few = next(window.far_rollouts for window in windows if _refused([window], row))
        print(
            f"beyond the far margin {row.far_margin:.2g} at {(all_gaps > row.far_margin).mean():.5f} of the positions; "
            f"honest tokens at a rate of at most {row.far_rate:.1e}\n"
            f"a window of {_WINDOW_TOKENS} tokens is refused for {few} rollouts with far margins, a history of one in "
            "so many tokens:"
            + "".join(f"  {tokens}: {_far_margins_until_refusal(tokens, row)}" for tokens in _SPACINGS)
        )
    print(flush=True)


def _far_margins_until_refusal(tokens: int, row: Thresholds) -> int:
    """Return after how many far margins, one in each window of so many tokens, a history is refused."""
    window = Counts(tokens, tokens, far_rollouts=1)
    return next(number for number in itertools.count(1) if _refused([window] * number, row))


def _refused(windows: list[Counts], row: Thresholds) -> bool:
    """Return whether the last one of some windows is refused, by itself or by the history of all."""
    worst = max(window_surprisal(windows[-1:], row), history_surprisal(windows_of(windows, row)))
    return worst > surprisal_threshold(row)
