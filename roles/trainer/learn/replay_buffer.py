"""The replay buffer: verified groups, from arrival to the last use, each counted.

Old groups are worth less, so a group of staleness s (versions behind the newest) is drawn with weight decay**s, and
beyond `max_staleness` not at all. The buffer is bounded in bytes; every group that leaves or is refused is counted by
its reason. The state (contents, counters, random state) is a mapping of tensors for a safetensors file: a restored
buffer draws what the saved one would have drawn.
"""

import json
import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor

Tokens = tuple[int, ...]

_RECORDS: Final = "records"
_LOGPROBS: Final = "logprobs"
_TOKEN_BYTES: Final = 12  # an int64 id and a float32 log-probability
_GROUP_BYTES: Final = 512  # what a group costs beside its tokens, about


@dataclass(frozen=True)
class TrainingGroup:
    """One verified group, ready to learn from.

    Attributes:
        digest: the content digest that verdicts named: 32 bytes.
        miner: its miner's public key.
        window: the window it was made for; version: the policy version that made it.
        prompt: token ids; completions: token ids of the R rollouts.
        logprobs: float32 [T] for each rollout, of its tokens under `version` at the sampling temperature.
        rewards: R rewards.
    """

    digest: bytes
    miner: bytes
    window: int
    version: int
    prompt: Tokens
    completions: tuple[Tokens, ...]
    logprobs: tuple[Tensor, ...]
    rewards: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.completions) == len(self.logprobs) == len(self.rewards) > 0:
            raise ValueError("a group has completions, each with log-probabilities and a reward")
        if any(len(c) != len(p) for c, p in zip(self.completions, self.logprobs, strict=True)):
            raise ValueError("one log-probability for each token")

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return _GROUP_BYTES + _TOKEN_BYTES * (len(self.prompt) + sum(map(len, self.completions)))

    @property
    def informative(self) -> bool:
        """Whether its rewards differ: without a better and a worse rollout every advantage is zero."""
        return min(self.rewards) < max(self.rewards)


class Outcome(StrEnum):
    """What became of a group. All but STORED are the reasons why one is not, or no longer, in the buffer."""

    STORED = "stored"
    DUPLICATE = "duplicate"  # its digest was offered before
    UNINFORMATIVE = "uninformative"  # all rewards alike: nothing to learn
    TOO_STALE = "too-stale"  # its version fell out of max_staleness before its uses were up
    CROWDED_OUT = "crowded-out"  # the buffer was full, and it was the oldest
    USED_UP = "used-up"  # trained on max_uses times


@dataclass(frozen=True)
class ReplaySettings:
    """Bounds of the buffer.

    Attributes:
        max_bytes: of all groups together.
        decay: weight of one version of staleness, in (0, 1].
        max_staleness: versions behind the newest; older groups leave.
        max_uses: times that one group is drawn.
    """

    max_bytes: int = 1 << 30
    decay: float = 0.7
    max_staleness: int = 8
    max_uses: int = 1


@dataclass
class _Entry:
    group: TrainingGroup
    uses: int = 0


class ReplayBuffer:
    """Groups in order of arrival.

    Args:
        settings: bounds.
        seed: of the draws.
    """

    def __init__(self, settings: ReplaySettings, seed: int) -> None:
        self._settings = settings
        self._random = random.Random(seed)  # noqa: S311 - a choice of samples, nothing secret
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._gone: dict[bytes, int] = {}  # digest -> version of groups that left, until a copy would be too stale
        self._bytes = 0
        self._newest = 0
        self._fates: Counter[Outcome] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes that the groups take, about."""
        return self._bytes

    @property
    def fates(self) -> Mapping[Outcome, int]:
        """How many groups came to each fate; STORED counts all that were ever let in."""
        return dict(self._fates)

    def advance(self, version: int) -> None:
        """The newest policy version is now this one: groups too far behind it leave.

        Raises:
            ValueError: versions do not go back.
        """
        if version < self._newest:
            raise ValueError(f"version {version} after {self._newest}")
        self._newest = version
        for digest in [d for d, entry in self._entries.items() if self._too_stale(entry.group.version)]:
            self._remove(digest, Outcome.TOO_STALE)
        self._gone = {d: v for d, v in self._gone.items() if not self._too_stale(v)}

    def add(self, group: TrainingGroup) -> Outcome:
        """Take a group in, or say why not. Older groups make room for it."""
        fate = self._admit(group)
        self._fates[fate] += 1
        if fate is not Outcome.STORED:
            if fate is not Outcome.DUPLICATE:
                self._gone[group.digest] = group.version
            return fate
        self._entries[group.digest] = _Entry(group)
        self._bytes += group.size
        while self._bytes > self._settings.max_bytes:
            oldest = min(self._entries, key=lambda d: self._entries[d].group.version)
            self._remove(oldest, Outcome.CROWDED_OUT)
        return fate

    def draw(self, count: int) -> list[TrainingGroup]:
        """Up to `count` different groups by weight decay**staleness, each counted as used once more."""
        # Efraimidis and Spirakis (2006): the largest u**(1/w) are a weighted draw without replacement.
        keys = {
            digest: self._random.random() ** (1.0 / self._weight(entry.group.version))
            for digest, entry in self._entries.items()
        }
        drawn = sorted(keys, key=lambda digest: keys[digest], reverse=True)[:count]
        groups = [self._entries[digest].group for digest in drawn]
        for digest in drawn:
            entry = self._entries[digest]
            entry.uses += 1
            if entry.uses >= self._settings.max_uses:
                self._remove(digest, Outcome.USED_UP)
        return groups

    def state(self) -> dict[str, Tensor]:
        """Contents, counters and random state as tensors by name, for a safetensors file."""
        kind, words, gauss = self._random.getstate()
        record = {
            "random": [kind, list(words), gauss],
            "newest": self._newest,
            "fates": {str(fate): count for fate, count in self._fates.items()},
            "gone": [[digest.hex(), version] for digest, version in self._gone.items()],
            "entries": [_record(entry) for entry in self._entries.values()],
        }
        text = bytearray(json.dumps(record, separators=(",", ":")).encode())
        flat = [p for entry in self._entries.values() for p in entry.group.logprobs]
        return {
            _RECORDS: torch.frombuffer(text, dtype=torch.uint8).clone(),
            _LOGPROBS: torch.cat(flat).to(torch.float32) if flat else torch.zeros(0),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state of our own (never a peer's).

        Raises:
            ValueError: it is no such state.
        """
        try:
            record = json.loads(bytes(state[_RECORDS].numpy()))
            kind, words, gauss = record["random"]
            entries = list(_entries(record["entries"], state[_LOGPROBS]))
            gone = {bytes.fromhex(digest): version for digest, version in record["gone"]}
            fates = Counter({Outcome(name): count for name, count in record["fates"].items()})
            self._random.setstate((kind, tuple(words), gauss))
            newest = int(record["newest"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a saved replay buffer: {error}") from error
        self._entries = OrderedDict((entry.group.digest, entry) for entry in entries)
        self._gone, self._fates, self._newest = gone, fates, newest
        self._bytes = sum(entry.group.size for entry in entries)

    def _admit(self, group: TrainingGroup) -> Outcome:
        if group.digest in self._entries or group.digest in self._gone:
            return Outcome.DUPLICATE
        if self._too_stale(group.version):
            return Outcome.TOO_STALE
        return Outcome.STORED if group.informative else Outcome.UNINFORMATIVE

    def _too_stale(self, version: int) -> bool:
        return self._newest - version > self._settings.max_staleness

    def _weight(self, version: int) -> float:
        return float(self._settings.decay ** max(0, self._newest - version))

    def _remove(self, digest: bytes, fate: Outcome) -> None:
        group = self._entries.pop(digest).group
        self._bytes -= group.size
        self._gone[digest] = group.version
        self._fates[fate] += 1


def _record(entry: _Entry) -> dict[str, Any]:
    group = entry.group
    return {
        "digest": group.digest.hex(),
        "miner": group.miner.hex(),
        "window": group.window,
        "version": group.version,
        "prompt": group.prompt,
        "completions": group.completions,
        "rewards": group.rewards,
        "uses": entry.uses,
    }


def _entries(records: Iterable[dict[str, Any]], logprobs: Tensor) -> Iterable[_Entry]:
    start = 0
    for record in records:
        completions = tuple(tuple(tokens) for tokens in record["completions"])
        parts = []
        for tokens in completions:
            parts.append(logprobs[start : start + len(tokens)].clone())
            start += len(tokens)
        group = TrainingGroup(
            digest=bytes.fromhex(record["digest"]),
            miner=bytes.fromhex(record["miner"]),
            window=record["window"],
            version=record["version"],
            prompt=tuple(record["prompt"]),
            completions=completions,
            logprobs=tuple(parts),
            rewards=tuple(record["rewards"]),
        )
        yield _Entry(group, record["uses"])
