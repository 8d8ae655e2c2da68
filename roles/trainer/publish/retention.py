"""Which anchors and patches stay in storage, and when an object that no head names any more is deleted.

The invariant: everything that a signed head names is in storage, from before the head is shown until after the last
head that names it has expired. Three rules keep the invariant under all settings, kills and restarts:

- A head names only what the publisher's durable record calls available.
- What a head leaves out is recorded as retired before any of it is deleted, and is never named again.
- An object is deleted only when every head that may name it has expired, even by a clock that is wrong by
  MAX_CLOCK_SKEW_MS.
"""

from collections.abc import Iterable, Set

from protocol.errors import ChainError
from protocol.limits import MAX_CHAIN, MAX_CLOCK_SKEW_MS

_MAX_RANGE = MAX_CHAIN // 2  # versions; the other half of what a head can list is for anchors whose upload lags


def check_retention(anchor_interval: int, keep_patches: int, keep_anchors: int) -> None:
    """Refuse settings by which a head may list more versions than MAX_CHAIN: ValueError says what to lower."""
    if anchor_interval * keep_anchors > _MAX_RANGE:
        name = "keep_anchors" if keep_anchors > 1 else "anchor_interval"
        raise ValueError(
            f"keep_anchors = {keep_anchors} anchors, {anchor_interval} versions apart, span more than the "
            f"{_MAX_RANGE} versions that a head can be relied on to list; lower trainer.{name}"
        )
    span = keep_patches + anchor_interval + _stride(keep_patches, keep_anchors)
    if span > _MAX_RANGE:
        raise ValueError(
            f"keep_patches = {keep_patches} with anchors {anchor_interval} versions apart span up to {span} versions, "
            f"more than the {_MAX_RANGE} that a head can be relied on to list; lower trainer.keep_patches"
        )


def retained_range(
    newest: int, available: Set[int], first_patch: int, keep_patches: int, keep_anchors: int
) -> tuple[tuple[int, ...], int]:
    """Return the anchors that a head of version `newest` names, ascending, and the oldest patch that it names.

    Retained are the last `keep_patches` patches, the last `keep_anchors` anchors, and the *base*: the anchor from which
    the oldest retained patch goes on. The base can only move on to an anchor that was retained until then, so of the
    anchors between base and newest version one of every `ceil(keep_patches / keep_anchors)` versions is retained as
    well. At most about twice `keep_anchors` anchors are retained in all, and the base is at most
    `keep_patches + anchor_interval + ceil(keep_patches / keep_anchors)` versions old while uploads succeed.

    `available` are versions up to `newest` whose anchor is complete in storage and was never retired; patches of
    versions before `first_patch` are retired. ChainError if no anchor is near enough to the newest version.
    """
    # A base leads to the newest version if the patch after it, and so all later ones, are not retired.
    available = {version for version in available if version > newest - MAX_CHAIN}
    bases = {version for version in available if version >= first_patch - 1}
    if not bases:
        raise ChainError(
            f"no anchor of the last {min(MAX_CHAIN, newest - first_patch + 2)} versions is in storage, so no head can "
            "show the chain; look at the storage, and set trainer.anchor_interval lower",
            f"version {newest}",
        )
    # The base should be as old as the oldest patch that is kept. Where no anchor is old enough, all patches are kept.
    latest_base = max(0, newest - keep_patches)
    base = max((version for version in bases if version <= latest_base), default=min(bases))
    stride = _stride(keep_patches, keep_anchors)
    # The first anchor of each stride does not change when later ones come, so what is retained now is retained until
    # the base passes it, and the base always finds a next anchor to move to.
    first_of_stride: dict[int, int] = {}
    for version in sorted(available):
        if version >= base:
            first_of_stride.setdefault(version // stride, version)
    anchors = {base, *sorted(available)[-keep_anchors:], *first_of_stride.values()}
    return tuple(sorted(anchors)), base + 1


def _stride(keep_patches: int, keep_anchors: int) -> int:
    return max(1, -(-keep_patches // keep_anchors))


class DeletionSchedule:
    """Decides when objects that no head names any more may be deleted; a head is valid for `head_ttl` seconds. It is
    not durable: after a restart every object waits anew, which is longer than needed and never shorter.
    """

    def __init__(self, head_ttl: float) -> None:
        self._delay = head_ttl + MAX_CLOCK_SKEW_MS / 1000
        self._deletion_times: dict[str, float] = {}

    def paths_to_delete(self, unnamed: Iterable[str], now: float) -> list[str]:
        """Return, in order, which unnamed paths may be deleted now (seconds of a clock that never goes back)."""
        # The dictionary is made anew, so an object that a head names again meanwhile begins its wait again.
        self._deletion_times = {path: self._deletion_times.get(path, now + self._delay) for path in unnamed}
        return sorted(path for path, time in self._deletion_times.items() if time <= now)
