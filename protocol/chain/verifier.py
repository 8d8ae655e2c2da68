"""The chain verifier: hostile bytes in, a trusted chain and a plan of what to fetch out (docs/spec/chain.md). No I/O.

The head is the only object that is ever replaced, and it is what makes a version visible: it is written after the data
and the manifests it speaks of, lists the digest of every manifest that is kept, and says which anchors are complete.

Order of checks on a head: size, form, signer, signature, fields, run, revision, expiry; epoch and version against what
this node trusts and against the head that it follows; then that it lists the very manifests that either of them does.
On a manifest: size, form, signer, signature, fields, the digest that the head lists, run, version, epoch, genesis, then
against the manifests on
either side: the link, the tensor table, and that epochs and windows never go back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from protocol import limits
from protocol.chain.manifest import Epoch, Head, Manifest, check_expiry
from protocol.encoding import Record, Version
from protocol.errors import ChainError, ForkError, GapError, RollbackError
from protocol.identity.authority import Revisions
from protocol.identity.signing import Digest, Signed, open_signed
from protocol.run import RunManifest


class Trust(Record):
    """What a node remembers on disk before it acts on it: it never follows anything older.

    Attributes:
        revision: of the authority, the one whose rewind this obeys; 0 for none.
    """

    kind: ClassVar[str] = "trust"
    run: Digest
    epoch: Epoch
    version: Version
    digest: Digest
    revision: Annotated[int, Field(ge=0, le=limits.MAX_REVISIONS)]


@dataclass(frozen=True)
class Plan:
    """How to reach a version: start from an anchor (or from the weights held), then patches in order.

    Attributes:
        anchor: the manifest whose anchor to load; None on the fast path.
        patches: manifests whose patches to apply, in order.
    """

    anchor: Manifest | None
    patches: tuple[Manifest, ...]


class ChainVerifier:
    """The trusted chain of one run.

    Use: `accept_head`, then fetch what `missing` names and `accept_manifest` each, then `plan`. The caller persists
    `trust` before it uses a plan.

    Args:
        trust: what this node trusted before.
        revisions: who may sign, as it is known at each check; None for what the run manifest says.
    """

    def __init__(
        self, run_id: bytes, run: RunManifest, trust: Trust | None = None, revisions: Revisions | None = None
    ) -> None:
        if trust is not None and trust.run != run_id:
            raise ValueError("the remembered trust is of another run")
        self._run_id = run_id
        self._run = run
        self._revisions = revisions or Revisions(run_id, run.authority)
        self._trust = trust
        self._head: Head | None = None
        self._manifests: dict[int, Signed[Manifest]] = {}

    @property
    def trust(self) -> Trust | None:
        """The highest (epoch, version, digest) trusted so far."""
        return self._trust

    @property
    def head(self) -> Head | None:
        """The newest head that was accepted."""
        return self._head

    def accept_head(self, data: bytes, now: float, *, even_expired: bool = False) -> Head:
        """Check a head; follow it if it is newer.

        Args:
            data: hostile bytes.
            now: seconds since the Unix epoch.
            even_expired: for looking at a run that has ended, never for acting on it.

        Raises:
            LimitError, MalformedError, SignatureError: not a head that a trainer of this run signed.
            ChainError: it is of another run, or counts for longer than the run allows.
            GapError: it was made under a revision of the authority that this node does not know.
            ExpiredError: nobody renewed it.
            RollbackError: it shows an older epoch or version than this node trusts, or than the head that it follows.
            ForkError: it shows another manifest for a version that this node trusts, or that the head it follows lists.
        """
        self.obey_rewind()
        head = open_signed(data, Head, self._revisions.current.trainers).record
        if head.run != self._run_id:
            raise ChainError("a head of another run", "head")
        if head.revision > self._revisions.number:
            raise GapError(
                f"made under revision {head.revision} of the authority, of which this node knows "
                f"{self._revisions.number}; storage hides the others",
                "head",
            )
        if not even_expired:
            check_expiry(head, now)
        if head.expires_ms > (now + self._run.head_ttl) * 1000.0 + limits.MAX_CLOCK_SKEW_MS:
            raise ChainError(f"counts for more than the {self._run.head_ttl} s that the run allows", "head")
        for known in (self._trust, self._head):
            if known is not None and (head.epoch < known.epoch or head.version < known.version):
                raise RollbackError(
                    f"epoch {head.epoch} version {head.version} behind epoch {known.epoch} version {known.version}",
                    "head",
                )
        trust = self._trust
        if trust is not None and trust.version >= head.base and head.digest(trust.version) != trust.digest:
            raise ForkError(f"another manifest for trusted version {trust.version}", "head")
        followed = self._head
        if followed is not None:
            for version in range(max(head.base, followed.base), followed.version + 1):
                if head.digest(version) != followed.digest(version):
                    raise ForkError(f"another manifest for version {version}", "head")
        self._head = head
        self._manifests = {version: kept for version, kept in self._manifests.items() if version >= head.base}
        self._raise_trust()
        return head

    def missing(self) -> list[tuple[int, bytes]]:
        """(version, digest) of the manifests that the head lists and this node has not seen, oldest first."""
        if self._head is None:
            return []
        versions = range(self._head.base, self._head.version + 1)
        return [(version, self._head.digest(version)) for version in versions if version not in self._manifests]

    def accept_manifest(self, version: int, data: bytes) -> Manifest:
        """Check a manifest that `missing` named.

        Raises:
            LimitError, MalformedError, SignatureError: not a manifest that a trainer of this run signed.
            ChainError: not the manifest that the head lists, or one that does not continue the chain.
        """
        head = self._head
        if head is None or not head.base <= version <= head.version:
            raise ValueError(f"version {version} is not one that the head lists")
        signed = open_signed(data, Manifest, self._revisions.current.trainers)
        place = f"manifest {version}"
        if signed.digest != head.digest(version):
            raise ChainError("not the one that the head lists", place)
        manifest = signed.record
        if (manifest.run, manifest.version) != (self._run_id, version) or manifest.epoch > head.epoch:
            raise ChainError("of another run, version or epoch", place)
        if version == 0 and manifest.weights != self._run.model.genesis:
            raise ChainError("not the genesis weights that the run names", place)
        before, after = self._manifests.get(version - 1), self._manifests.get(version + 1)
        if before is not None:
            self._check_link(before, manifest, place)
        if after is not None:
            self._check_link(signed, after.record, f"manifest {version + 1}")
        self._manifests[version] = signed
        self._raise_trust()
        return manifest

    @staticmethod
    def _check_link(before: Signed[Manifest], manifest: Manifest, place: str) -> None:
        if manifest.previous != before.digest:
            raise ForkError("does not continue the manifest before it", place)
        if manifest.tensors != before.record.tensors:
            raise ChainError("other tensors than the version before", place)
        if manifest.epoch < before.record.epoch or manifest.first_window < before.record.first_window:
            raise ChainError("an epoch or a window that goes back", place)

    def _raise_trust(self) -> None:
        """Trust the newest version once every manifest up to it is linked."""
        head = self._head
        if head is None or not self._complete():
            return
        obeyed = self._trust.revision if self._trust is not None else self._newest_rewind()
        self._trust = Trust(
            run=self._run_id,
            epoch=head.epoch,
            version=head.version,
            digest=head.digest(head.version),
            revision=obeyed,
        )

    def _newest_rewind(self) -> int:
        rewind = self._revisions.rewind
        return rewind[0] if rewind is not None else 0

    def obey_rewind(self) -> None:
        """Forget what a stolen key published, once for each revision of the authority that says so."""
        rewind = self._revisions.rewind
        if self._trust is None or rewind is None or rewind[0] <= self._trust.revision:
            return
        number, point = rewind
        self._head = None
        self._trust = self._trust.model_copy(
            update={"epoch": 0, "revision": number, "version": point.version, "digest": point.digest}
        )
        at_point = self._manifests.get(point.version)
        good = at_point is not None and at_point.digest == point.digest
        self._manifests = {v: kept for v, kept in self._manifests.items() if good and v <= point.version}

    def _complete(self) -> bool:
        """Whether every manifest that the head lists is at hand; none but those ever is."""
        return self._head is not None and len(self._manifests) == len(self._head.manifests)

    def manifest(self, version: int) -> Manifest:
        """A verified manifest.

        Raises:
            GapError: not kept, or not fetched yet.
        """
        try:
            return self._manifests[version].record
        except KeyError:
            raise GapError("its manifest is not at hand", f"version {version}") from None

    def manifests(self) -> Iterator[Manifest]:
        """All verified manifests, oldest first."""
        return (self._manifests[version].record for version in sorted(self._manifests))

    def branch(self) -> "ChainVerifier":
        """A verifier in the same state that goes its own way: what it learns is kept by keeping it, or forgotten with
        it.
        """
        other = ChainVerifier(self._run_id, self._run, self._trust, self._revisions)
        other._head = self._head
        other._manifests = dict(self._manifests)
        return other

    def version_for(self, window: int) -> int:
        """The newest version that serves a window.

        Raises:
            GapError: no version that is kept serves it yet, or not every manifest is at hand: a newer version may serve
                it.
        """
        if not self._complete():
            raise GapError("not every manifest that the head lists is at hand", f"window {window}")
        serving = [m.version for m in self.manifests() if m.first_window <= window]
        if not serving:
            raise GapError("no kept version serves it", f"window {window}")
        return max(serving)

    def plan(self, held: int | None, target: int) -> Plan:
        """The cheapest way to a version.

        Args:
            held: the version whose verified weights are at hand; None for none.
            target: the version wanted.

        Raises:
            GapError: no path: a patch on the way was never made or is no longer kept, and no kept anchor helps.
        """
        if held is not None and self._reach(target) <= held <= target:
            return Plan(None, tuple(self.manifest(version) for version in range(held + 1, target + 1)))
        return self.slow_plan(target)

    def slow_plan(self, target: int) -> Plan:
        """The way from the newest complete anchor that leads to a version.

        Raises:
            GapError: no kept anchor leads there.
        """
        if self._head is None:
            raise GapError("no head was accepted yet", f"version {target}")
        reach = self._reach(target)
        for anchor in reversed(self._head.anchors):
            if reach <= anchor <= target and self.manifest(anchor).anchor:
                patches = tuple(self.manifest(version) for version in range(anchor + 1, target + 1))
                return Plan(self.manifest(anchor), patches)
        raise GapError("no kept anchor leads there", f"version {target}")

    def _reach(self, target: int) -> int:
        """The oldest version from which patches lead to `target` that were made and are kept."""
        oldest_patch = self._head.oldest_patch if self._head is not None else target + 1
        version = target
        while (
            version >= oldest_patch and version in self._manifests and self._manifests[version].record.patch is not None
        ):
            version -= 1
        return version
