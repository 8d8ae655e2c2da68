"""What all tables share: a policy with its older versions, and stored measurements."""

import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from bench.proofs import trained_policy
from bench.proofs.batched_engine import BatchedEngine
from bench.proofs.sides import Pair, Side
from bench.proofs.trading_task import UNKNOWN, TradingTask
from grailnode.calibration.pairs import CalibrationTask, GroupMeasurement, check_groups, generate_groups
from grailnode.cli.actions.policy_evaluation import PolicyRules
from grailnode.engine.policy import Policy
from grailnode.engine.qwen3 import Qwen3
from grailnode.run import creation
from grailnode.run.rules import Rules
from protocol.judging.ledger import GROUP
from protocol.run import SamplingSpec
from roles.policy.assignment import PolicyTask
from tests.support.adversaries.harness import PolicyHistory, TrialHarness
from tests.support.builders.proofs import LENIENT, packaged_thresholds, proof_of

SCORING: Final = creation.SCORING.model_copy(update={"deposit": round(Rules().deposit * GROUP)})
"""The scoring of a run that is created with the default rules."""

GROUP_SIZE: Final = 8
CALIBRATION_SEED: Final = 0
_CHUNK: Final = 64  # groups of one file of results


@dataclass(frozen=True)
class Setting:
    """The policy of the tables, and a folder for results, with which an interrupted table can resume.

    Attributes:
        directory: directory of the policy and its versions.
        cache: folder of the results.
        excluded_pairs: names of pairs that are left out, such as those of two threads, which take long on a busy
            machine.
        test_seed: of the groups of tables, which are others than those for thresholds.
    """

    directory: Path
    cache: Path
    excluded_pairs: tuple[str, ...] = ()
    test_seed: int = 1

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

    def harness(self, groups: int, *, concurrent: bool = False, tokens: int | None = None) -> TrialHarness:
        """Return the harness of a run whose thresholds refuse next to nothing.

        Args:
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
            proof_of(packaged_thresholds().model_copy(update=LENIENT)),
            max_tokens,
            groups=groups,
            group_size=GROUP_SIZE,
            wrap=BatchedEngine if concurrent else lambda engine: engine,  # type: ignore[arg-type]
        )

    def task(self, seed: int) -> CalibrationTask:
        """Return the task on which pairs are measured."""
        params, environment, policy = trained_policy.PARAMS, TradingTask(), self.policy
        sampling = SamplingSpec(temperature=params.temperature, max_tokens=params.max_tokens, stops=params.stops)
        task = PolicyTask(bytes(32), PolicyRules(sampling), environment, policy.tokenizer, policy.vocabulary)
        return CalibrationTask(
            policy, params, GROUP_SIZE, lambda data: environment.problem(data).prompt, seed=seed, task=task
        )

    def model(self) -> Qwen3:
        """Return the model of the policy."""
        return trained_policy.Recipe().model()

    async def measure(
        self, profile: str, pairs: Mapping[str, Pair], groups: Mapping[str, int], seed: int
    ) -> dict[str, list[GroupMeasurement]]:
        """Measure groups of pairs, or load the measurements that are stored. Pairs that generate in one way check the
        same rollouts.

        Args:
            profile: what all sides have in common, in the names of the files.
            pairs: by their names.
            groups: of each pair.
            seed: of the groups.
        """
        self.cache.mkdir(parents=True, exist_ok=True)
        measurements: dict[str, list[GroupMeasurement]] = {name: [] for name in pairs}
        for first in range(0, max(groups.values()), _CHUNK):
            counts = {name: min(_CHUNK, groups[name] - first) for name in pairs if groups[name] > first}
            paths = {
                name: self.cache / f"{profile}-{name}-{seed}-{first:06d}-{count}.npz".replace(" ", "-")
                for name, count in counts.items()
            }
            missing: dict[tuple[Side, int], list[str]] = {}
            for name, path in paths.items():
                if not path.is_file():
                    missing.setdefault((pairs[name].generating, counts[name]), []).append(name)
            for (side, count), names in missing.items():
                checking = {name: pairs[name].checking for name in names}
                async for name, measured in self._check(side, checking, first, count, seed):
                    save(paths[name], measured)
                print(f"  {profile}: {first + count} groups of {', '.join(names)}", file=sys.stderr, flush=True)
            for name, path in paths.items():
                measurements[name] += load(path)
        return measurements

    async def _check(
        self, generating: Side, checking: Mapping[str, Side], first: int, count: int, seed: int
    ) -> AsyncIterator[tuple[str, list[GroupMeasurement]]]:
        """Yield the measurements of groups that one side generates and some others check."""
        task, errors = self.task(seed), (seed << 32) + 2 * first
        engine = await generating.serve(self.policy, self.weights, errors)
        submissions = [part async for part in generate_groups(task, engine, count, first=first)]
        for name, side in checking.items():
            engine = await side.serve(self.policy, self.weights, errors + 1)
            yield name, [group for part in submissions for group in await check_groups(task, engine, part)]


@lru_cache(maxsize=4)
def _load_version(directory: Path, number: int) -> dict[str, Tensor]:
    return trained_policy.load_version(directory, number)


_OF_ROLLOUTS: Final = ("lengths", "rewards")


def columns_of_positions() -> list[str]:
    """Return the names of the fields of a GroupMeasurement that have a value for each position. The task of the tables
    has no episodes, whose fields are left out.
    """
    others = (*_OF_ROLLOUTS, "turns", "reproduced")
    return [item.name for item in fields(GroupMeasurement) if item.name not in others]


def save(path: Path, measurements: Sequence[GroupMeasurement]) -> None:
    """Store measurements in one file."""
    partial = path.with_suffix(".tmp.npz")
    arrays = {
        name: np.concatenate([getattr(group, name) for group in measurements])
        for name in (*_OF_ROLLOUTS, *columns_of_positions())
    }
    np.savez(partial, allow_pickle=False, sizes=np.array([len(item.lengths) for item in measurements]), **arrays)
    partial.rename(path)


def load(path: Path) -> Iterator[GroupMeasurement]:
    """Yield the measurements of a file."""
    with np.load(path) as file:
        data = {name: file[name] for name in file.files}
    rollout = position = 0
    for size in data["sizes"].tolist():
        rollouts = slice(rollout, rollout + size)
        positions = slice(position, position + int(data["lengths"][rollouts].sum()))
        values: dict[str, Any] = {name: data[name][positions] for name in columns_of_positions()}
        values |= {name: tuple(data[name][rollouts].tolist()) for name in _OF_ROLLOUTS}
        yield GroupMeasurement(**values)
        rollout, position = rollouts.stop, positions.stop
