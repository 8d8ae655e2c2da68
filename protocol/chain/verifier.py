"""The chain verifier: it turns hostile bytes into a trusted chain and a plan of what to fetch (docs/spec/chain.md). No
I/O.

The head is the only object that is ever replaced. A version becomes visible with its head, which the trainer writes
after the data and the manifests. The head lists the digest of every manifest in storage and the versions whose anchors
are complete.

Order of checks on a head: size, form, signer, signature, fields, run, revision, expiry; epoch and version against the
trust of this node and against the current head; then that it lists the same manifests as both.
Order of checks on a manifest: size, form, signer, signature, fields, the digest in the head, run, version, epoch,
genesis, difficulty table; then, against the manifests before and after it: the link, the tensor table, and that epochs
and windows never decrease.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from protocol import limits
from protocol.chain.manifest import Epoch, Head, Manifest, check_expiry
from protocol.difficulty import table_refusal
from protocol.encoding import Record, Version
from protocol.errors import ChainError, ForkError, GapError, RollbackError
from protocol.identity.authority import Revisions
from protocol.identity.signing import Digest, Signed, open_signed
from protocol.quantization import check_table
from protocol.run import RunManifest


class Trust(Record):
    """The newest version that a node has trusted, on disk before it acts on it: it never follows an older chain."""

    kind: ClassVar[str] = "trust"
    run: Digest
    epoch: Epoch
    version: Version
    digest: Digest  # SHA-256 of the body of the version's manifest
    # number of the newest revision of the authority whose rewind was applied; 0 for none
    revision: Annotated[int, Field(ge=0, le=limits.MAX_REVISIONS)]


@dataclass(frozen=True)
class Plan:
    """The steps to reach a version: load an anchor (or start from the current weights), then apply patches."""

    anchor: Manifest | None  # the manifest whose anchor to load; None to start from the current weights
    patches: tuple[Manifest, ...]  # the manifests whose patches to apply, in order


class ChainVerifier:
    """The verified chain of one run.

    Use: `accept_head`, then fetch each of `missing_manifests` and `accept_manifest` it, then `plan`. The caller
    persists `trust` before it uses a plan. A new node has none; ValueError if it is of another run. The authority is
    read from the revisions at each check; without them it is that of the run manifest.
    """

    def __init__(
        self, run_id: bytes, run: RunManifest, trust: Trust | None = None, revisions: Revisions | None = None
    ) -> None:
        if trust is not None and trust.run != run_id:
            raise ValueError("the remembered trust is of another run")
        self._run_id = run_id
        self._run = run
        self._revisions = revisions or Revisions(run_id, run.authority)
        self.trust = trust  # the highest (epoch, version, digest) trusted so far; None before the first
        self.head: Head | None = None  # the newest accepted one; None before the first
        self._manifests: dict[int, Signed[Manifest]] = {}

    def accept_head(self, data: bytes, now: float, *, allow_expired: bool = False) -> Head:
        """Check a head and make it the current one.

        Args:
            data: hostile bytes.
            now: seconds since the Unix epoch.
            allow_expired: whether to accept an expired head; only to inspect a run that has ended, never to act on it.

        Raises:
            LimitError, MalformedError, SignatureError: the bytes are no head that a trainer of this run signed.
            ChainError: the head is of another run, or valid for longer than the run allows.
            GapError: the head was made under a revision of the authority that this node does not have.
            ExpiredError: nobody renewed the head.
            RollbackError: the head has a lower epoch or version than this node trusts, or than the current head, or
                was made before a rewind that takes back versions that it shows.
            ForkError: the head lists another manifest for the trusted version, or for a version in the current head.
        """
        self.apply_rewind()
        head = open_signed(data, Head, self._revisions.current.trainers).record
        if head.run != self._run_id:
            raise ChainError("a head of another run", "head")
        if head.revision > self._revisions.number:
            raise GapError(
                f"made under revision {head.revision} of the authority, but this node has only "
                f"{self._revisions.number}; storage hides the others",
                "head",
            )
        if is_taken_back(head, self._revisions):
            raise RollbackError("shows versions that a later revision of the authority takes back", "head")
        if not allow_expired:
            check_expiry(head, now)
        if head.expires_ms > (now + self._run.head_ttl) * 1000.0 + limits.MAX_CLOCK_SKEW_MS:
            raise ChainError(f"valid for more than the {self._run.head_ttl} s that the run allows", "head")
        trust, current = self.trust, self.head
        for floor in (trust, current):
            if floor is not None and (head.epoch < floor.epoch or head.version < floor.version):
                raise RollbackError(
                    f"epoch {head.epoch} version {head.version} behind epoch {floor.epoch} version {floor.version}",
                    "head",
                )
        if trust is not None and trust.version >= head.base and head.digest(trust.version) != trust.digest:
            raise ForkError(f"another manifest for trusted version {trust.version}", "head")
        if current is not None:
            for version in range(max(head.base, current.base), current.version + 1):
                if head.digest(version) != current.digest(version):
                    raise ForkError(f"another manifest for version {version}", "head")
        self.head = head
        self._manifests = {version: manifest for version, manifest in self._manifests.items() if version >= head.base}
        self._raise_trust()
        return head

    def missing_manifests(self) -> list[tuple[int, bytes]]:
        """Return (version, digest) of the manifests in the head that were not accepted yet, oldest first."""
        if self.head is None:
            return []
        versions = range(self.head.base, self.head.version + 1)
        return [(version, self.head.digest(version)) for version in versions if version not in self._manifests]

    def accept_manifest(self, version: int, data: bytes) -> Manifest:
        """Check one of the `missing_manifests` and add it to the chain.

        Args:
            data: hostile bytes.

        Raises:
            ValueError: the head does not list this version.
            LimitError, MalformedError, SignatureError: the bytes are no manifest that a trainer of this run signed.
            ChainError: the manifest is not the one in the head, or does not continue the chain.
        """
        head = self.head
        if head is None or not head.base <= version <= head.version:
            raise ValueError(f"the head does not list version {version}")
        verified = open_signed(data, Manifest, self._revisions.current.trainers)
        place = f"manifest {version}"
        if verified.digest != head.digest(version):
            raise ChainError("not the one that the head lists", place)
        manifest = verified.record
        if (manifest.run, manifest.version) != (self._run_id, version) or manifest.epoch > head.epoch:
            raise ChainError("of another run, version or epoch", place)
        if version == 0 and manifest.weights != self._run.model.genesis:
            raise ChainError("not the run's genesis weights", place)
        if self._run.lora is not None:
            self._run.lora.check_table(manifest.tensors, place)
        check_table(self._run.precision, manifest.tensors, place)
        if refusal := table_refusal(self._run.difficulty, manifest.difficulty, manifest.first_window):
            raise ChainError(refusal, place)
        before, after = self._manifests.get(version - 1), self._manifests.get(version + 1)
        if before is not None:
            self._check_link(before, manifest, place)
        if after is not None:
            self._check_link(verified, after.record, f"manifest {version + 1}")
        self._manifests[version] = verified
        self._raise_trust()
        return manifest

    @staticmethod
    def _check_link(before: Signed[Manifest], manifest: Manifest, place: str) -> None:
        if manifest.previous != before.digest:
            raise ForkError("does not continue the manifest before it", place)
        if manifest.tensors != before.record.tensors:
            raise ChainError("other tensors than the version before", place)
        if manifest.epoch < before.record.epoch or manifest.first_window < before.record.first_window:
            raise ChainError("a lower epoch or window than the version before", place)
        tables = before.record.difficulty, manifest.difficulty
        if tables[0] is not None and tables[1] is not None and tables[1].window < tables[0].window:
            raise ChainError("a difficulty table of an older window than the version before", place)

    def _raise_trust(self) -> None:
        """Trust the newest version if every manifest up to it was accepted."""
        head = self.head
        if head is None or not self._complete():
            return
        rewind = self._revisions.rewind
        revision = self.trust.revision if self.trust is not None else rewind[0] if rewind is not None else 0
        self.trust = Trust(
            run=self._run_id,
            epoch=head.epoch,
            version=head.version,
            digest=head.digest(head.version),
            revision=revision,
        )

    def apply_rewind(self) -> None:
        """Forget the versions that a stolen key published, once for each revision of the authority with a rewind."""
        rewind = self._revisions.rewind
        if self.trust is None or rewind is None or rewind[0] <= self.trust.revision:
            return
        number, point = rewind
        self.head = None
        self.trust = self.trust.model_copy(
            update={"epoch": 0, "revision": number, "version": point.version, "digest": point.digest}
        )
        at_point = self._manifests.get(point.version)
        good = at_point is not None and at_point.digest == point.digest
        self._manifests = {v: manifest for v, manifest in self._manifests.items() if good and v <= point.version}

    def _complete(self) -> bool:
        """Return whether every manifest in the head was accepted; others are never stored."""
        return self.head is not None and len(self._manifests) == len(self.head.manifests)

    def manifest(self, version: int) -> Manifest:
        """Return the verified manifest of a version, or raise GapError if it was not accepted yet."""
        if version not in self._manifests:
            raise GapError("its manifest is missing", f"version {version}")
        return self._manifests[version].record

    def manifests(self) -> Iterator[Manifest]:
        """Return all verified manifests, oldest first."""
        return (self._manifests[version].record for version in sorted(self._manifests))

    def branch(self) -> "ChainVerifier":
        """Return a copy of this verifier. What the copy accepts does not change this verifier."""
        other = ChainVerifier(self._run_id, self._run, self.trust, self._revisions)
        other.head = self.head
        other._manifests = dict(self._manifests)
        return other

    def version_for(self, window: int) -> int:
        """Return the newest version that serves a window; GapError for none, or if a newer one may be missing."""
        if not self._complete():
            raise GapError("manifests that the head lists are missing", f"window {window}")
        versions = [m.version for m in self.manifests() if m.first_window <= window]
        if not versions:
            raise GapError("no version in the head serves it", f"window {window}")
        return max(versions)

    def plan(self, current: int | None, target: int) -> Plan:
        """Return the cheapest plan to reach a version from that of the node's verified weights, None for none; GapError
        if a patch on the way is nowhere, and no anchor in storage leads there.
        """
        if current is not None and self._reach(target) <= current <= target:
            return Plan(None, tuple(self.manifest(version) for version in range(current + 1, target + 1)))
        return self.slow_plan(target)

    def slow_plan(self, target: int) -> Plan:
        """Return the plan to reach a version from the newest complete anchor; GapError if none leads there."""
        if self.head is None:
            raise GapError("no head was accepted yet", f"version {target}")
        reach = self._reach(target)
        for anchor in reversed(self.head.anchors):
            if reach <= anchor <= target and self.manifest(anchor).anchor:
                patches = tuple(self.manifest(version) for version in range(anchor + 1, target + 1))
                return Plan(self.manifest(anchor), patches)
        raise GapError("no anchor in storage leads there", f"version {target}")

    def _reach(self, target: int) -> int:
        """Return the oldest version from which patches in storage lead to `target`."""
        oldest_patch = self.head.oldest_patch if self.head is not None else target + 1
        version = target
        while version >= oldest_patch and version in self._manifests and self.manifest(version).patch is not None:
            version -= 1
        return version


def is_taken_back(head: Head, revisions: Revisions) -> bool:
    """Return whether a head shows versions that were taken back by a revision that its trainer did not have."""
    rewind = revisions.rewind
    return rewind is not None and head.revision < rewind[0] and head.version > rewind[1].version
