"""What all tables share: the zoo's policy, its past, thresholds measured on honest pairs, and a place for what was
computed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
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
from grailnode.calibration.variants import Pair, Variant, cross_pairs, run_pairs
from grailnode.engine.policy import Policy
from grailnode.engine.qwen3 import Qwen3
from protocol.rollout.sketch import SketchKind
from protocol.run import ProofSpec
from tests.support.adversaries import trained_policy as zoo
from tests.support.adversaries.harness import Field, Past
from tests.support.adversaries.stories import UNKNOWN, Stories

GROUP_SIZE: Final = 8
CALIBRATION_SEED: Final = 0
TEST_SEED: Final = 1
BASE: Final = Variant()
_CHUNK: Final = 16  # groups of one file of results
_COPY_GROUPS: Final = 48


@dataclass(frozen=True)
class Profile:
    """A run's honest nodes, by the pairs that its thresholds are measured on."""

    name: str
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Setting:
    """The policy in a directory, and a folder for results, so that a bench that was stopped goes on where it was.

    Attributes:
        without: names of pairs to leave out: two threads wait for each other on a machine that has other work.
    """

    directory: Path
    cache: Path
    without: tuple[str, ...] = ()

    @cached_property
    def policy(self) -> Policy:
        """Tokenizer and config."""
        return Policy.load(self.directory)

    @cached_property
    def newest(self) -> int:
        """The version that serves."""
        return max(int(path.stem.split("-")[1]) for path in self.directory.glob("version-*.safetensors"))

    def version(self, number: int) -> dict[str, Tensor]:
        """Weights of a version."""
        return _loaded(self.directory, number)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights of the version that serves."""
        return self.version(self.newest)

    def past(self) -> Past:
        """For the field."""
        draft = self.directory / zoo.DRAFT
        return Past(self.policy, self.newest, self.version, load_file(draft) if draft.is_file() else None)

    def field(self, proof: ProofSpec, groups: int, *, together: bool = False, tokens: int | None = None) -> Field:
        """One run with these thresholds.

        Args:
            together: windows are tried side by side.
            tokens: of each completion, which then no token ends; None for those of stories.
        """
        past, longest = self.past(), zoo.PARAMS.max_tokens
        if tokens is not None:
            past, longest = replace(past, policy=replace(past.policy, eos=UNKNOWN)), tokens
        return Field(past, Stories(), proof, longest, groups=groups, group_size=GROUP_SIZE, together=together)

    def work(self, seed: int, kind: SketchKind = "projection") -> CalibrationTask:
        """What is asked of pairs."""
        return CalibrationTask(
            self.policy, zoo.PARAMS, GROUP_SIZE, lambda data: Stories().problem(data).prompt, kind, seed
        )

    def model(self) -> Qwen3:
        """The architecture."""
        return zoo.Recipe().model()

    def profiles(self) -> tuple[Profile, Profile]:
        """Nodes that all compute in float32, and nodes of which some compute in bfloat16."""
        same = tuple(pair for pair in run_pairs(BASE, self.policy) if pair.name not in self.without)
        mixed = tuple(pair for pair in cross_pairs(BASE) if pair.name.startswith("bfloat16"))
        return Profile("float32", same), Profile("mixed", same + mixed)

    async def observed(
        self, pair: Pair, groups: int, seed: int, claimed: Mapping[str, Tensor] | None = None, label: str = ""
    ) -> list[GroupMeasurement]:
        """What the check sees of a pair's groups, kept in files of a few groups each."""
        self.cache.mkdir(parents=True, exist_ok=True)
        found: list[GroupMeasurement] = []
        for first in range(0, groups, _CHUNK):
            path = self.cache / f"{label or 'honest'}-{pair.name}-{seed}-{first:06d}.npz"
            if not path.is_file():
                count = min(_CHUNK, groups - first)
                work = self.work(seed)
                seen = [item async for item in measure_pair(work, pair, self.weights, count, copy=claimed, first=first)]
                _save(path, seen)
                print(f"  {path.stem}", flush=True)
            found += _load(path)
        return found[:groups]

    async def proof(self, profile: Profile, groups: int) -> ProofSpec:
        """The thresholds that calibration gives for a profile."""
        path = self.cache / f"proof-{profile.name}-{groups}.json"
        if not path.is_file():
            honest = {
                pair.name: await self.observed(pair, _share(pair, groups), CALIBRATION_SEED) for pair in profile.pairs
            }
            copy = quantized(self.weights, 4)
            pairs = [profile.pairs[0]] + [pair for pair in profile.pairs if pair.name == "bfloat16-generated"]
            seen = [await self.observed(pair, _COPY_GROUPS, CALIBRATION_SEED, copy, "copy-4") for pair in pairs]
            spec = choose_thresholds(honest, seen, "projection", ThresholdDemands())
            path.write_text(json.dumps(spec.model_dump()))
        return ProofSpec(**json.loads(path.read_text()))


def _share(pair: Pair, groups: int) -> int:
    """So many groups, or half of them of the pairs that take long: those that compute every sequence alone."""
    return max(8, groups // 2) if "alone" in pair.name else groups


@lru_cache(maxsize=4)
def _loaded(directory: Path, number: int) -> dict[str, Tensor]:
    return zoo.load_version(directory, number)


def _columns() -> list[str]:
    """The arrays of an Observed, a value a position each."""
    return [field.name for field in fields(GroupMeasurement) if field.name != "lengths"]


def _save(path: Path, seen: Sequence[GroupMeasurement]) -> None:
    partial = path.with_suffix(".tmp.npz")
    arrays = {name: np.concatenate([getattr(item, name) for item in seen]) for name in _columns()}
    sizes, lengths = [len(item.lengths) for item in seen], [length for item in seen for length in item.lengths]
    np.savez(partial, allow_pickle=False, sizes=np.array(sizes), lengths=np.array(lengths), **arrays)
    partial.rename(path)


def _load(path: Path) -> Iterator[GroupMeasurement]:
    with np.load(path) as kept:
        data = {name: kept[name] for name in kept.files}
    rollout = position = 0
    for size in data["sizes"].tolist():
        lengths = tuple(data["lengths"][rollout : rollout + size].tolist())
        part = slice(position, position + sum(lengths))
        yield GroupMeasurement(lengths, **{name: data[name][part] for name in _columns()})
        rollout, position = rollout + size, part.stop
