"""The replay buffer: verified groups from their arrival, of which there is one (training_spool.py), to their last use.

Old groups are worth less, so a group of staleness s (versions behind the newest) is drawn with weight decay**s, and
beyond `max_staleness` not at all. The buffer is bounded in bytes. Its state has contents and random state: a restored
buffer draws what the saved one would have drawn.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from protocol.encoding import Record, Version
from protocol.errors import ProtocolError
from protocol.identity.signing import Digest
from protocol.limits import MAX_SHARD_BYTES
from roles.trainer.learn.training_settings import ReplaySettings
from roles.trainer.spool import is_too_stale
from roles.trainer.verified_batch import VerifiedGroup


@dataclass
class _Entry:
    group: VerifiedGroup
    uses: int = 0


class ReplayState(Record):
    """The state of a replay buffer at some moment."""

    kind: ClassVar[str] = "replay"
    max_bytes: ClassVar[int] = MAX_SHARD_BYTES
    max_items: ClassVar[int] = 1 << 24
    random_words: tuple[int, ...]  # the state of Python's generator
    newest_version: Version
    groups: tuple[tuple[bytes, int], ...]  # in order of arrival, each with its uses
    unacknowledged: tuple[Digest, ...]  # groups that the spool may give out again


class ReplayBuffer:
    """Groups in order of arrival; the draws follow from the seed."""

    def __init__(self, settings: ReplaySettings, seed: int) -> None:
        self._settings = settings
        self.max_staleness = settings.max_staleness
        self._random = random.Random(seed)  # noqa: S311 - a choice of samples, nothing secret
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.size = 0  # bytes of memory that the groups take, about
        self._newest_version = 0

    def __len__(self) -> int:
        return len(self._entries)

    def advance(self, version: int) -> None:
        """Set the newest policy version, none lower than before (ValueError); groups that are now too stale leave."""
        if version < self._newest_version:
            raise ValueError(f"version {version} after {self._newest_version}")
        self._newest_version = version
        for digest in [d for d, entry in self._entries.items() if self._too_stale(entry.group.version)]:
            self._remove(digest)

    def add(self, group: VerifiedGroup) -> bool:
        """Store a group that was not offered before, unless it is too stale, or has nothing to teach; return whether it
        was. The oldest groups leave if the buffer is full.
        """
        if self._too_stale(group.version) or (self._settings.filters_groups and not group.informative):
            return False
        self._entries[group.digest] = _Entry(group)
        self.size += group.size
        while self.size > self._settings.replay_bytes:
            self._remove(min(self._entries, key=lambda d: self._entries[d].group.version))
        return True

    def draw(self, count: int) -> list[VerifiedGroup]:
        """Draw up to `count` different groups by weight decay**staleness, and count a use of each."""
        # Efraimidis and Spirakis (2006): the largest u**(1/w) are a weighted draw without replacement. Their logarithms
        # do not underflow where a small decay makes w tiny.
        keys = {
            digest: _log(self._random.random())
            / self._settings.decay ** max(0, self._newest_version - entry.group.version)
            for digest, entry in self._entries.items()
        }
        digests = sorted(keys, key=lambda digest: keys[digest], reverse=True)[:count]
        groups = [self._entries[digest].group for digest in digests]
        for digest in digests:
            entry = self._entries[digest]
            entry.uses += 1
            if entry.uses >= self._settings.max_uses:
                self._remove(digest)
        return groups

    def freeze(self, unacknowledged: Iterable[bytes] = ()) -> Callable[[], bytes]:
        """Take no time, and return a function that writes the state of this moment, with the digests of groups that are
        not acknowledged; it may run in another thread.
        """
        (_, words, _), newest_version = self._random.getstate(), self._newest_version
        entries = [(entry.group, entry.uses) for entry in self._entries.values()]
        return lambda: ReplayState(
            random_words=words,
            newest_version=newest_version,
            groups=tuple((group.to_bytes(), uses) for group, uses in entries),
            unacknowledged=tuple(sorted(unacknowledged)),
        ).to_bytes()

    def restore(self, data: bytes) -> tuple[bytes, ...]:
        """Go on from a saved state of our own (never a peer's), and return the digests of the groups that were not
        acknowledged; ValueError if it is none, and nothing has changed.
        """
        random_state = random.Random()  # noqa: S311 - as above
        try:
            state = ReplayState.from_bytes(data)
            random_state.setstate((3, state.random_words, None))
            entries = [_Entry(VerifiedGroup.from_bytes(group), uses) for group, uses in state.groups]
        except ProtocolError as error:
            raise ValueError(f"not a saved replay buffer: {error}") from error
        self._random = random_state
        self._entries = OrderedDict((entry.group.digest, entry) for entry in entries)
        self._newest_version = state.newest_version
        self.size = sum(entry.group.size for entry in entries)
        return state.unacknowledged

    def _too_stale(self, version: int) -> bool:
        return is_too_stale(version, self._newest_version, self.max_staleness)

    def _remove(self, digest: bytes) -> None:
        self.size -= self._entries.pop(digest).group.size


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf
