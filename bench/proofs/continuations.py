"""Table (k): what a validator decodes to count luck, and how the rewards of honest work differ from its continuations.

A line has the arithmetics of miner and validator, the judged tokens and rollouts, how many rollouts are continued, by
how many tokens, as a share of those that are judged, the share that is not trained on, and the sums of rewards below
and above the continuations'. The last line is of a miner in bfloat16 that misses the first near tie of each rollout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from bench.proofs.setting import GROUP_SIZE, Setting
from protocol.judging.evidence import LUCK_UNIT, NO_COUNTS
from protocol.rollout.sampling import SamplingParams
from roles.miner.produce import HonestProducer
from roles.ports import Generation, Request
from roles.validator.judge import Judge
from tests.support.adversaries.decisive_tokens import TieEngine
from tests.support.adversaries.harness import TrialHarness
from tests.support.builders.proofs import LENIENT, packaged_thresholds

_DTYPES: Final = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
_GROUPS: Final = 16  # of a window
_REACH: Final = 0.03  # of the hostile miner; margins up to it have no price by the packaged row


@dataclass
class EarlyMissEngine(TieEngine):
    """Takes the second-best token at the first near tie of each rollout: a validator generates all behind it again."""

    reach: float
    _missed: set[bytes] = field(default_factory=set, init=False)

    def choose(self, prompt: tuple[int, ...], seed: bytes, completion: list[int], scores: torch.Tensor) -> int:
        best = scores.topk(2)
        misses = seed not in self._missed and float(best.values[0] - best.values[1]) <= self.reach
        self._missed |= {seed} if misses else set()
        return int(best.indices[int(misses)])


async def table(setting: Setting, groups: int, tokens: int | None) -> None:
    """Print a line for each pair of dtypes of miner and validator, with about so many groups, and so many tokens of
    each rollout; None for stories.
    """
    for miner, validator in _DTYPES:
        harness = setting.harness(_GROUPS, tokens=tokens)
        await _line(harness, miner, validator, max(1, groups // _GROUPS))
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in setting.weights.items()}
    engine: Any = EarlyMissEngine(setting.model(), weights, _REACH)
    await _line(harness, "bfloat16", "bfloat16", 1, HonestProducer(harness.task, engine))


async def _line(
    plain: TrialHarness, miner: str, validator: str, windows: int, hostile: HonestProducer | None = None
) -> None:
    producer, checker = (
        replace(plain, dtype=getattr(torch, dtype), _engines={}, _group_cache={}) for dtype in (miner, validator)
    )
    engine, row = await checker.serving_engine(), packaged_thresholds().model_copy(update=LENIENT)
    generate, decoded = engine.generate, list[int]()

    async def counted(requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        generations = await generate(requests, params)
        decoded.extend(len(item.tokens) for item in generations)
        return generations

    engine.generate = counted  # type: ignore[method-assign]
    counts, tokens, cut = NO_COUNTS, 0, 0
    for window in range(windows):
        place = producer.mining_window(window), range(_GROUPS)
        made = await (producer.honest_groups(*place) if hostile is None else hostile.produce(*place))
        judge = Judge(plain.task, engine, window, plain.randomness(window), draw=bytes(32))
        for judgement in await judge.judge([(group, bytes(32)) for group in made], row):
            counts, tokens = counts + judgement.counts, tokens + judgement.tokens
            cut += judgement.tokens - sum(judgement.ends) if judgement.ends else 0
        producer._group_cache.clear()
    name = miner if hostile is None else "hostile"
    less, more = (total / LUCK_UNIT for total in counts.luck.steps)
    print(
        f"{name:9}{validator:9}{tokens:9} tokens of {windows * _GROUPS * GROUP_SIZE:6} rollouts; {len(decoded):5} "
        f"continued by {sum(decoded):7} tokens, {sum(decoded) / tokens:.2%}; {cut / tokens:.2%} not trained on; "
        f"rewards {less:g} below and {more:g} above",
        flush=True,
    )
