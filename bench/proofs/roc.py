"""Table (c): the smallest change that is told from honest work, and how many tokens that takes.

For a changed policy: the share of groups refused by themselves, then the tokens until its miner is refused where the
groups are one window that grows (`tokens`) and where each is a window of its own (`apart`), the median over shuffled
orders. A dash: not refused within all the groups.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from bench.proofs.setting import TEST_SEED, Setting
from grailnode.calibration.copies import quantized
from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.thresholds import beyond, is_refused
from protocol.judging.evidence import Counts, history_surprisal, surprisal_threshold, window_surprisal
from protocol.rollout import challenge, sampling
from protocol.run import ProofSpec
from roles.ports import Request
from tests.support.adversaries.weight_changes import changed_share, perturbed

_ORDERS = 50
_MIXED = ((8, 4), (4, 3), (3, 2))


def _mixed(weights: Mapping[str, Tensor], more: int, fewer: int) -> dict[str, Tensor]:
    """Every other matrix with fewer bits."""
    high, low = quantized(weights, more), quantized(weights, fewer)
    return {name: (low if place % 2 else high)[name] for place, name in enumerate(sorted(weights))}


def _tokens(count: float | None) -> str:
    return "-" if count is None else f"{count:.0f}"


def _copies(setting: Setting) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    weights = setting.weights
    for bits in range(8, 1, -1):
        yield f"{bits}-bit weights", quantized(weights, bits)
    for more, fewer in _MIXED:
        yield f"{more}- and {fewer}-bit weights", _mixed(weights, more, fewer)
    for old in (1, 2, 5, 10, 20, 50):
        yield f"{old} versions old", setting.version(setting.newest - old)
    for relative in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2):
        yield f"weights off by {relative:g}", perturbed(weights, relative)


def detected_after(groups: list[GroupMeasurement], spec: ProofSpec, *, apart: bool) -> float | None:
    """Tokens until a miner is refused, the median over shuffled orders; None where more than half never are.

    Args:
        apart: each group is a window of its own; else they are one window that grows.
    """
    weighed = [group.weigh(spec) for group in groups]
    generator, needed = np.random.default_rng(0), []
    for _ in range(_ORDERS):
        counts: list[Counts] = []
        for index in generator.permutation(len(weighed)):
            evidence = weighed[index]
            counts.append(evidence.counts)
            together = history_surprisal(counts, spec) if apart else window_surprisal(counts, spec)
            if is_refused(evidence, spec) or together > surprisal_threshold(spec):
                needed.append(sum(count.tokens for count in counts))
                break
    return float(np.median(needed)) if len(needed) > _ORDERS // 2 else None


async def table(setting: Setting, groups: int, calibration: int) -> None:
    """Print it."""
    profiles = setting.profiles()
    specs = [await setting.proof(profile, calibration) for profile in profiles]
    pair = profiles[0].pairs[0]
    heads = "".join(f"  {profile.name + ': groups':>15} {'tokens':>7} {'apart':>7}" for profile in profiles)
    print(f"{'change':26} {'weights':>8} {'off':>9} {'margins':>9}{heads}")
    for label, copy in _copies(setting):
        seen = await setting.observed(pair, groups, TEST_SEED, copy, label.replace(" ", "-"))
        distances = np.concatenate([group.fresh for group in seen])
        margins = np.concatenate([group.margins for group in seen])
        line = f"{label:26} {changed_share(setting.weights, copy):8.4f} "
        line += f"{beyond(distances, specs[0].sketch_tolerance).mean():9.5f} {(margins > 0).mean():9.5f}"
        for spec in specs:
            share = np.mean([is_refused(group.weigh(spec), spec) for group in seen])
            together, apart = (detected_after(seen, spec, apart=apart) for apart in (False, True))
            line += f"  {share:15.2f} {_tokens(together):>7} {_tokens(apart):>7}"
        print(line, flush=True)
    await edits(setting, specs, [profile.name for profile in profiles])


async def edits(setting: Setting, specs: list[ProofSpec], names: list[str]) -> None:
    """How often a single token can be changed without a trace: places where the runner-up is as good as the winner."""
    work, engine = (
        setting.work(TEST_SEED),
        await setting.profiles()[0].pairs[0].checking.serve(setting.policy, setting.weights),
    )
    gaps: list[np.ndarray] = []
    for number in range(24):
        seed = challenge.group_seed(bytes(32), 0, b"edits".ljust(32), bytes(32), number)
        prompt = setting.policy.tokenizer.encode(work.prompt(seed))
        requests = [Request(prompt, challenge.rollout_seed(seed, index)) for index in range(16)]
        done = await engine.generate(requests, work.params)
        seen = await engine.forward([prompt] * len(done), [item.tokens for item in done])
        for request, item, forward in zip(requests, done, seen, strict=True):
            words = sampling.seed_words([request.seed]).expand(len(item.tokens), 4)
            logits = forward.logits
            scores = logits + sampling.noise(words, torch.arange(len(item.tokens)), logits.shape[-1])
            best = scores.topk(2, dim=-1).values
            gaps.append((best[:, 0] - best[:, 1]).numpy())
    gap = np.concatenate(gaps)
    print(f"\none token changed to the runner-up, {len(gap)} places; quantiles of its margin:", end="")
    print("".join(f"  {q:g}: {np.quantile(gap, q):.3g}" for q in (1e-3, 1e-2, 0.1, 0.5)))
    for spec, name in zip(specs, names, strict=True):
        print(
            f"{name}: beyond the margin limit {spec.margin_limit:.2g}, so that this one token refuses its group, at "
            f"{(gap > spec.margin_limit).mean():.5f} of the places; no miss at {(gap <= spec.margin).mean():.5f}"
        )
