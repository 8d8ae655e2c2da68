"""What all tables share: a policy with its older versions, thresholds measured on honest pairs, and stored results."""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from grailnode.calibration.copies import quantized
from grailnode.calibration.pairs import CalibrationTask, GroupMeasurement, measure_pair
from grailnode.calibration.thresholds import ThresholdDemands, choose_thresholds
from grailnode.calibration.variants import Pair, Variant, run_pairs
from grailnode.engine.policy import Policy
from grailnode.engine.qwen3 import Qwen3
from protocol.proof import Thresholds
from protocol.rollout.sketch import SketchKind
from tests.support.adversaries import trained_policy
from tests.support.adversaries.harness import PolicyHistory, TrialHarness
from tests.support.adversaries.trading_task import UNKNOWN, TradingTask
from tests.support.builders.proofs import FLOAT32, bfloat16_pairs, proof_of

GROUP_SIZE: Final = 8
CALIBRATION_SEED: Final = 0
TEST_SEED: Final = 1
BASE: Final = Variant()
_CHUNK: Final = 16  # groups of one file of results
_COPY_GROUPS: Final = 48


@dataclass(frozen=True)
class Profile:
    """The honest nodes of a run.

    Attributes:
        name: name of the profile.
        pairs: the honest pairs on which the run's thresholds are measured.
    """

    name: str
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Setting:
    """The policy of the tables, and a folder for results, with which an interrupted table can resume.

    Attributes:
        directory: directory of the policy and its versions.
        cache: folder of the results.
        excluded_pairs: names of pairs that are left out, such as those of two threads, which take long on a busy
            machine.
    """

    directory: Path
    cache: Path
    excluded_pairs: tuple[str, ...] = ()

    @cached_property
    def policy(self) -> Policy:
        """The tokenizer and the model's config."""
        return Policy.load(self.directory)

    @cached_property
    def newest(self) -> int:
        """The number of the serving version."""
        return max(int(path.stem.split("-")[1]) for path in self.directory.glob("version-*.safetensors"))

    def version(self, number: int) -> dict[str, Tensor]:
        """Return the weights of a version."""
        return _load_version(self.directory, number)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights of the serving version."""
        return self.version(self.newest)

    def policy_history(self) -> PolicyHistory:
        """Return the policy and its older versions for the harness."""
        draft = self.directory / trained_policy.DRAFT
        return PolicyHistory(self.policy, self.newest, self.version, load_file(draft) if draft.is_file() else None)

    def harness(
        self, thresholds: Thresholds, groups: int, *, concurrent: bool = False, tokens: int | None = None
    ) -> TrialHarness:
        """Return the harness of a run with some thresholds.

        Args:
            thresholds: of the run.
            groups: groups of a window.
            concurrent: whether windows are produced and judged concurrently.
            tokens: length of each completion, which then has no end token; None for stories.
        """
        policy_history, max_tokens = self.policy_history(), trained_policy.PARAMS.max_tokens
        if tokens is not None:
            policy_history, max_tokens = (
                replace(policy_history, policy=replace(policy_history.policy, stops=(UNKNOWN,))),
                tokens,
            )
        return TrialHarness(
            policy_history,
            TradingTask(),
            proof_of(thresholds),
            max_tokens,
            groups=groups,
            group_size=GROUP_SIZE,
            batched=concurrent,
        )

    def task(self, seed: int, kind: SketchKind = "projection") -> CalibrationTask:
        """Return the task on which pairs are measured."""
        return CalibrationTask(
            self.policy, trained_policy.PARAMS, GROUP_SIZE, lambda data: TradingTask().problem(data).prompt, kind, seed
        )

    def model(self) -> Qwen3:
        """Return the model of the policy."""
        return trained_policy.Recipe().model()

    def profiles(self) -> tuple[Profile, Profile]:
        """Return the profile whose nodes all compute in float32, and the one in which some compute in bfloat16."""
        same = tuple(pair for pair in run_pairs(BASE, BASE, self.policy) if pair.name not in self.excluded_pairs)
        return Profile("float32", same), Profile("mixed", same + bfloat16_pairs())

    async def measure(
        self, pair: Pair, groups: int, seed: int, copied_weights: Mapping[str, Tensor] | None = None, label: str = ""
    ) -> list[GroupMeasurement]:
        """Measure groups of a pair, or load the measurements that are stored, in files of 16 groups.

        Args:
            pair: the honest pair.
            groups: number of groups.
            seed: seed of the groups.
            copied_weights: weights with which the groups are generated; None for those of the policy.
            label: name of the weights in the names of files.
        """

        async def part(first: int, count: int) -> list[GroupMeasurement]:
            task = self.task(seed)
            return [
                item async for item in measure_pair(task, pair, self.weights, count, copy=copied_weights, first=first)
            ]

        return await self.stored(f"{label or 'honest'}-{pair.name}-{seed}", groups, part)

    async def stored(
        self, name: str, groups: int, part: Callable[[int, int], Awaitable[list[GroupMeasurement]]]
    ) -> list[GroupMeasurement]:
        """Return measurements that are stored under a name, in files of 16 groups; those that are missing are made.

        Args:
            part: measures groups: the first one, and how many.
        """
        self.cache.mkdir(parents=True, exist_ok=True)
        measurements: list[GroupMeasurement] = []
        for first in range(0, groups, _CHUNK):
            path = self.cache / f"{name.replace(' ', '-')}-{first:06d}.npz"
            if not path.is_file():
                _save(path, await part(first, min(_CHUNK, groups - first)))
                print(f"  {path.stem}", flush=True)
            measurements += _load(path)
        return measurements[:groups]

    async def proof(self, profile: Profile, groups: int) -> Thresholds:
        """Return the thresholds of a profile, calibrated with `groups` groups of each pair or loaded."""
        path = self.cache / f"proof-{profile.name}-{groups}.json"
        if not path.is_file():
            honest = {
                pair.name: await self.measure(pair, _calibration_groups(pair, groups), CALIBRATION_SEED)
                for pair in profile.pairs
            }
            copy = quantized(self.weights, 4)
            pairs = [profile.pairs[0]] + [pair for pair in profile.pairs if pair.name == "bfloat16-generated"]
            measurements_of_copy = [
                await self.measure(pair, _COPY_GROUPS, CALIBRATION_SEED, copy, "copy-4") for pair in pairs
            ]
            spec = choose_thresholds(honest, measurements_of_copy, FLOAT32, ThresholdDemands())
            path.write_text(json.dumps(spec.model_dump()))
        return Thresholds(**json.loads(path.read_text()))


def _calibration_groups(pair: Pair, groups: int) -> int:
    """Return how many groups of a pair calibration measures: half if the pair computes every sequence alone."""
    return max(8, groups // 2) if "alone" in pair.name else groups


@lru_cache(maxsize=4)
def _load_version(directory: Path, number: int) -> dict[str, Tensor]:
    return trained_policy.load_version(directory, number)


def _columns() -> list[str]:
    """Return the names of the arrays of a GroupMeasurement that have a value for each position."""
    return [column.name for column in fields(GroupMeasurement) if column.name != "lengths"]


def _save(path: Path, measurements: Sequence[GroupMeasurement]) -> None:
    partial = path.with_suffix(".tmp.npz")
    arrays = {name: np.concatenate([getattr(item, name) for item in measurements]) for name in _columns()}
    sizes, lengths = (
        [len(item.lengths) for item in measurements],
        [length for item in measurements for length in item.lengths],
    )
    np.savez(partial, allow_pickle=False, sizes=np.array(sizes), lengths=np.array(lengths), **arrays)
    partial.rename(path)


def _load(path: Path) -> Iterator[GroupMeasurement]:
    with np.load(path) as file:
        data = {name: file[name] for name in file.files}
    rollout = position = 0
    for size in data["sizes"].tolist():
        lengths = tuple(data["lengths"][rollout : rollout + size].tolist())
        part = slice(position, position + sum(lengths))
        yield GroupMeasurement(lengths, **{name: data[name][part] for name in _columns()})
        rollout, position = rollout + size, part.stop
