"""Who may act in a run: the authority, and the revisions that replace it (docs/spec/authority.md). No I/O.

Revision 0 is what the run manifest says. Each later one is signed by enough roots of the one before it, and by enough
of its own where they differ. Order of checks: size, form, enough of the roots before, every signature, form of the
body, the new roots, soundness of keys, run, number, link, and the digest of a revision of that number that is known
already.
"""

from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from protocol import limits
from protocol.encoding import Line, Record, Version
from protocol.errors import ChainError, ForkError, GapError, RollbackError, SignatureError
from protocol.identity.signing import Digest, Key, Signed, check_public_key, claimed_signers, open_announced

Keys = Annotated[tuple[Key, ...], Field(min_length=1, max_length=limits.MAX_KEYS)]
ManyKeys = Annotated[tuple[Key, ...], Field(max_length=limits.MAX_PARTICIPANTS)]


def _ascend(keys: tuple[bytes, ...]) -> bool:
    return all(left < right for left, right in pairwise(keys))


class Admission(Record):
    """Who may mine.

    Attributes:
        miners: most miners that are taken notice of, in all.
        credential: what `open` asks of an announcement (protocol/identity/admission.py); empty for nothing.
        difficulty: a number for the credential.
        allowed: keys of `allowlist`; inviters: keys that may invite beside the roots.
    """

    kind: ClassVar[str] = "admission"
    policy: Literal["open", "allowlist", "invite"]
    miners: Annotated[int, Field(ge=1, le=limits.MAX_PARTICIPANTS)]
    credential: Annotated[str, Field(max_length=32, pattern=r"^[a-z0-9-]*$")]
    difficulty: Annotated[int, Field(ge=0, le=256)]
    allowed: ManyKeys
    inviters: Annotated[tuple[Key, ...], Field(max_length=limits.MAX_KEYS)]

    @model_validator(mode="after")
    def _ordered(self) -> "Admission":
        if not (_ascend(self.allowed) and _ascend(self.inviters)):
            raise ValueError("keys do not ascend")
        return self


OPEN = Admission(policy="open", miners=limits.MAX_PARTICIPANTS, credential="", difficulty=0, allowed=(), inviters=())
"""Anyone may mine."""


class Authority(Record):
    """Who may act.

    Attributes:
        roots, root_threshold: the keys that may sign the next revision, and how many must.
        trainers, validators, quorum: the keys that may publish policies and verdicts, and how many validators must
            accept.
        revoked: keys that may do nothing, in any role.
    """

    kind: ClassVar[str] = "authority"
    roots: Keys
    root_threshold: Annotated[int, Field(ge=1, le=limits.MAX_SIGNATURES)]
    trainers: Keys
    validators: Keys
    quorum: Annotated[int, Field(ge=1, le=limits.MAX_KEYS)]
    admission: Admission
    revoked: ManyKeys

    @model_validator(mode="after")
    def _consistent(self) -> "Authority":
        if any(len(set(keys)) < len(keys) for keys in (self.roots, self.trainers, self.validators)):
            raise ValueError("a key twice in one role")
        if self.root_threshold > len(self.roots):
            raise ValueError("root_threshold exceeds the number of roots")
        if self.quorum > len(self.validators):
            raise ValueError("quorum exceeds the number of validators")
        if not _ascend(self.revoked):
            raise ValueError("revoked keys do not ascend")
        if not set(self.revoked).isdisjoint(self._named()):
            raise ValueError("a revoked key in a role")
        return self

    def _named(self) -> tuple[bytes, ...]:
        admission = self.admission
        return (*self.roots, *self.trainers, *self.validators, *admission.allowed, *admission.inviters)

    def check_keys(self) -> None:
        """Refuse unsound keys.

        Raises:
            SignatureError: a key of small order or not canonical.
        """
        for key in self._named():
            check_public_key(key)


class ChainPoint(Record):
    """A version, and the SHA-256 of its manifest's body."""

    kind: ClassVar[str] = "point"
    version: Version
    digest: Digest


class Revision(Record):
    """What replaces an authority.

    Attributes:
        previous: SHA-256 of the body of the revision before; the run id for number 1.
        rewind: the last version that counts of a chain that a stolen key went on with; None otherwise.
        note: why, for people.
    """

    kind: ClassVar[str] = "revision"
    max_bytes: ClassVar[int] = limits.MAX_RUN_BYTES
    run: Digest
    number: Annotated[int, Field(ge=1, le=limits.MAX_REVISIONS)]
    previous: Digest
    authority: Authority
    rewind: ChainPoint | None
    note: Annotated[Line, Field(max_length=200)]


class Revisions:
    """The revisions that a node knows, verified: the one mutable thing that says who may act now.

    Use: `check` what stands where a revision is due; persist it; then `adopt` it.
    """

    def __init__(self, run_id: bytes, founding: Authority) -> None:
        self._run_id = run_id
        self._current = founding
        self._digests = [run_id]
        self._roots = [(founding.roots, founding.root_threshold)]
        self._rewind: tuple[int, ChainPoint] | None = None

    @property
    def run_id(self) -> bytes:
        """Of the run."""
        return self._run_id

    @property
    def current(self) -> Authority:
        """Who may act now."""
        return self._current

    @property
    def number(self) -> int:
        """Of the newest revision known; 0 for the run manifest."""
        return len(self._digests) - 1

    @property
    def digest(self) -> bytes:
        """Of the newest revision: what the next one names as `previous`."""
        return self._digests[-1]

    @property
    def rewind(self) -> tuple[int, ChainPoint] | None:
        """The newest revision that rewinds the chain, by its number, and to where."""
        return self._rewind

    def check(self, number: int, data: bytes) -> Signed[Revision]:
        """Check what stands where revision `number` is due: one that is known already, or the next.

        Args:
            data: hostile bytes.

        Raises:
            LimitError, MalformedError: not a revision.
            SignatureError: not signed by enough roots, or by others, or it names an unsound key.
            RollbackError, GapError: a revision of a lower or a higher number.
            ForkError: it does not continue the revision before, or another revision of this number is known.
            ChainError: of another run.
        """
        if not 1 <= number <= self.number + 1:
            raise ValueError(f"revision {number} is neither known nor the next")
        place = f"revision {number}"
        roots, threshold = self._roots[number - 1]
        signers = set(claimed_signers(data, Revision))
        _enough(signers, roots, threshold, place)
        signed = open_announced(data, Revision)
        revision, after = signed.record, signed.record.authority
        if not signers <= {*roots, *after.roots}:
            raise SignatureError("signed by a key that is no root", place)
        if (after.roots, after.root_threshold) != (roots, threshold):
            _enough(signers, after.roots, after.root_threshold, f"{place}, new roots")
        after.check_keys()
        if revision.run != self._run_id:
            raise ChainError("of another run", place)
        if revision.number != number:
            kind = RollbackError if revision.number < number else GapError
            raise kind(f"revision {revision.number} stands in its place", place)
        if revision.previous != self._digests[number - 1]:
            raise ForkError("does not continue the revision before it", place)
        if number <= self.number and signed.digest != self._digests[number]:
            raise ForkError("another one is signed by the roots as well", place)
        return signed

    def adopt(self, signed: Signed[Revision]) -> None:
        """Act by a revision that `check` found to be the next."""
        revision = signed.record
        if revision.number != self.number + 1:
            raise ValueError(f"revision {revision.number} does not follow {self.number}")
        self._digests.append(signed.digest)
        self._roots.append((revision.authority.roots, revision.authority.root_threshold))
        self._current = revision.authority
        if revision.rewind is not None:
            self._rewind = (revision.number, revision.rewind)


def _enough(signers: set[bytes], roots: tuple[bytes, ...], threshold: int, place: str) -> None:
    count = len(signers & set(roots))
    if count < threshold:
        raise SignatureError(f"signed by {count} roots where {threshold} must sign", place)
