"""The authority of a run (the keys that may act), and the revisions that replace it (docs/spec/authority.md). No I/O.

Revision 0 is the authority in the run manifest. Each later revision is signed by enough roots of the revision before
it, and by enough of its own roots if they differ. Order of checks: size, form, enough of the previous roots, every
signature, form of the body, enough of the new roots, soundness of keys, run, number, link, and the digest of the
revision that this node already has under that number.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from protocol import limits
from protocol.encoding import Ascending, Line, Record, Version
from protocol.errors import ChainError, ForkError, GapError, RollbackError, SignatureError
from protocol.identity.participant import SPACE_FORM
from protocol.identity.signing import Digest, Key, Signed, check_public_key, claimed_signers, open_announced

Keys = Annotated[tuple[Key, ...], Field(min_length=1, max_length=limits.MAX_KEYS)]
Workers = Annotated[tuple[Key, ...], Field(max_length=limits.MAX_WORKERS), Ascending]
MirrorUrl = Annotated[str, Field(min_length=1, max_length=limits.MAX_SPACE_BYTES, pattern=SPACE_FORM)]
ManyKeys = Annotated[tuple[Key, ...], Field(max_length=limits.MAX_WINDOW_MINERS), Ascending]


class Admission(Record):
    """The rules that decide which keys may mine (fields: docs/spec/authority.md)."""

    kind: ClassVar[str] = "admission"
    policy: Literal["open", "allowlist", "invite"]
    miners: Annotated[int, Field(ge=1, le=limits.MAX_WINDOW_MINERS)]
    credential: Annotated[str, Field(max_length=32, pattern=r"^[a-z0-9-]*$")]
    difficulty: Annotated[int, Field(ge=0, le=256)]
    allowed: ManyKeys
    inviters: Annotated[tuple[Key, ...], Field(max_length=limits.MAX_KEYS), Ascending]


OPEN = Admission(policy="open", miners=limits.MAX_WINDOW_MINERS, credential="", difficulty=0, allowed=(), inviters=())
"""The admission rules of a run in which anyone may mine."""


class Authority(Record):
    """The keys that may act in a run (fields: docs/spec/authority.md)."""

    kind: ClassVar[str] = "authority"
    roots: Keys
    root_threshold: Annotated[int, Field(ge=1, le=limits.MAX_SIGNATURES)]
    trainers: Keys
    validators: Keys
    workers: Workers = ()
    quorum: Annotated[int, Field(ge=1, le=limits.MAX_KEYS)]
    admission: Admission
    revoked: ManyKeys
    mirrors: Annotated[tuple[MirrorUrl, ...], Field(max_length=limits.MAX_MIRRORS), Ascending] = ()

    @model_validator(mode="after")
    def _consistent(self) -> "Authority":
        if any(len(set(keys)) < len(keys) for keys in (self.roots, self.trainers, self.validators)):
            raise ValueError("a key twice in one role")
        if self.root_threshold > len(self.roots):
            raise ValueError("root_threshold exceeds the number of roots")
        if self.quorum > len(self.validators):
            raise ValueError("quorum exceeds the number of validators")
        if not set(self.revoked).isdisjoint(self._active_keys()):
            raise ValueError("a revoked key in a role")
        if not set(self.workers).isdisjoint(self.trainers):  # they would delete each other's payloads
            raise ValueError("a trainer's key among those of workers")
        return self

    def _active_keys(self) -> tuple[bytes, ...]:
        admission = self.admission
        return (*self.roots, *self.trainers, *self.validators, *self.workers, *admission.allowed, *admission.inviters)

    def check_keys(self) -> None:
        for key in self._active_keys():
            check_public_key(key)


class ChainPoint(Record):
    """A version of the policy, with the SHA-256 of its manifest's body."""

    kind: ClassVar[str] = "point"
    version: Version
    digest: Digest


class Revision(Record):
    """A record that replaces the authority (fields: docs/spec/authority.md)."""

    kind: ClassVar[str] = "revision"
    max_bytes: ClassVar[int] = limits.MAX_RUN_BYTES
    run: Digest
    number: Annotated[int, Field(ge=1, le=limits.MAX_REVISIONS)]
    previous: Digest
    authority: Authority
    rewind: ChainPoint | None
    note: Annotated[Line, Field(max_length=200)]


class Revisions:
    """The verified revisions of one run that a node has; the last one gives the current authority.

    Use: `check` the bytes at the path of a revision, persist them, then `adopt` the revision. `all_trainers`,
    `all_validators` and `lowest_quorum` are those of any revision.
    """

    def __init__(self, run_id: bytes, initial: Authority) -> None:
        self.run_id = run_id
        self.current = initial
        self.all_trainers, self.all_validators = set(initial.trainers), set(initial.validators)
        self.lowest_quorum = initial.quorum
        # the number and the rewind of the newest revision that rewinds the chain; None if there is none
        self.rewind: tuple[int, ChainPoint] | None = None
        self._digests = [run_id]
        self._roots = [(initial.roots, initial.root_threshold)]

    @property
    def number(self) -> int:
        """The number of the newest revision; 0 for the run manifest."""
        return len(self._digests) - 1

    @property
    def digest(self) -> bytes:
        """The digest of the newest revision, which the next one has as `previous`."""
        return self._digests[-1]

    def check(self, number: int, data: bytes) -> Signed[Revision]:
        """Check the bytes at the path of revision `number`, which is one that this node has already, or the next.

        Args:
            data: hostile bytes.

        Raises:
            ValueError: the number is higher than that.
            LimitError, MalformedError: the bytes are no revision.
            SignatureError: too few roots signed it, another key did, or it contains an unsound key.
            RollbackError, GapError: it has a lower or a higher number.
            ForkError: it does not continue the revision before, or this node has another revision of this number.
            ChainError: it belongs to another run.
        """
        if not 1 <= number <= self.number + 1:
            raise ValueError(f"revision {number} is higher than the next one, {self.number + 1}")
        place = f"revision {number}"
        roots, threshold = self._roots[number - 1]
        signers = set(claimed_signers(data, Revision))
        _enough(signers, roots, threshold, place)
        verified = open_announced(data, Revision)
        revision, after = verified.record, verified.record.authority
        if not signers <= {*roots, *after.roots}:
            raise SignatureError("signed by a key that is no root", place)
        if (after.roots, after.root_threshold) != (roots, threshold):
            _enough(signers, after.roots, after.root_threshold, f"{place}, new roots")
        after.check_keys()
        if revision.run != self.run_id:
            raise ChainError("of another run", place)
        if revision.number != number:
            kind = RollbackError if revision.number < number else GapError
            raise kind(f"revision {revision.number} stands in its place", place)
        if revision.previous != self._digests[number - 1]:
            raise ForkError("does not continue the revision before it", place)
        if number <= self.number and verified.digest != self._digests[number]:
            raise ForkError("the roots have signed another revision of this number", place)
        return verified

    def adopt(self, verified: Signed[Revision]) -> None:
        """Make a revision that `check` accepted the current authority; ValueError if it is not the next one."""
        revision = verified.record
        if revision.number != self.number + 1:
            raise ValueError(f"revision {revision.number} does not follow {self.number}")
        self._digests.append(verified.digest)
        self._roots.append((revision.authority.roots, revision.authority.root_threshold))
        self.current = revision.authority
        self.all_trainers.update(self.current.trainers)
        self.all_validators.update(self.current.validators)
        self.lowest_quorum = min(self.lowest_quorum, self.current.quorum)
        if revision.rewind is not None:
            self.rewind = (revision.number, revision.rewind)


def _enough(signers: set[bytes], roots: tuple[bytes, ...], threshold: int, place: str) -> None:
    count = len(signers & set(roots))
    if count < threshold:
        raise SignatureError(f"signed by {count} roots where {threshold} must sign", place)
