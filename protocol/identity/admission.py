"""Which miners are taken notice of (docs/spec/authority.md). Pure.

A *gate* decides for one authority. `may_fetch` looks at a key alone, before anything is fetched; `admit` looks at an
announcement whose signature was checked. A new credential for open runs (a stake, a captcha) is a `Credential` beside
`ProofOfWork`, under a name of its own.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Protocol

from pydantic import Field

from protocol import limits
from protocol.encoding import Record
from protocol.errors import AdmissionError, ProtocolError
from protocol.identity.authority import Admission, Authority
from protocol.identity.participant import Announcement, Role
from protocol.identity.signing import Digest, Key, open_signed

_WORK_DOMAIN: Final = b"grailnode/1 work"


class ProofOfWorkSolution(Record):
    """A proof of work: expires_ms and nonce such that the digest of `work_digest` begins with enough zero bits."""

    kind: ClassVar[str] = "work"
    expires_ms: Annotated[int, Field(ge=0, lt=1 << 53)]
    nonce: Annotated[int, Field(ge=0, lt=1 << 64)]


class Invite(Record):
    """A token that lets one key mine, signed by an inviter or a root."""

    kind: ClassVar[str] = "invite"
    max_bytes: ClassVar[int] = limits.MAX_PROOF_BYTES
    run: Digest
    key: Key
    expires_ms: Annotated[int, Field(ge=0, lt=1 << 53)]


class Credential(Protocol):
    """What an open run asks of an announcement beside its signature."""

    def check(self, announcement: Announcement, difficulty: int, now_ms: float) -> None:
        """Return if the announcement's proof is enough.

        Raises:
            ProtocolError: it is not; AdmissionError where it is well-formed.
        """


def work_digest(run_id: bytes, key: bytes, work: ProofOfWorkSolution) -> bytes:
    """SHA-256 of what a proof of work is bound to."""
    tail = work.expires_ms.to_bytes(8, "little") + work.nonce.to_bytes(8, "little")
    return hashlib.sha256(_WORK_DOMAIN + run_id + key + tail).digest()


def leading_zero_bits(digest: bytes) -> int:
    """Zero bits before the first one, the most significant bit of the first byte first."""
    return 8 * len(digest) - int.from_bytes(digest, "big").bit_length()


def do_work(run_id: bytes, key: bytes, difficulty: int, expires_ms: int) -> ProofOfWorkSolution:
    """Find a proof of work: about 2^difficulty tries."""
    nonce = 0
    while True:
        work = ProofOfWorkSolution.model_construct(expires_ms=expires_ms, nonce=nonce)
        if leading_zero_bits(work_digest(run_id, key, work)) >= difficulty:
            return work
        nonce += 1


class ProofOfWork:
    """Hashcash, bound to run, key and time: a thousand strangers cost a thousand times as much as one."""

    def check(self, announcement: Announcement, difficulty: int, now_ms: float) -> None:
        """Return if the work was done and still counts."""
        work = ProofOfWorkSolution.from_bytes(announcement.proof)
        if not now_ms < work.expires_ms <= now_ms + limits.MAX_WORK_MS:
            raise AdmissionError("its proof of work has expired, or expires too far from now", "announcement")
        bits = leading_zero_bits(work_digest(announcement.run, announcement.key, work))
        if bits < difficulty:
            raise AdmissionError(f"its proof of work has {bits} zero bits of {difficulty}", "announcement")


CREDENTIALS: Final[Mapping[str, Credential]] = {"work": ProofOfWork()}
"""The credentials that this program knows, by the name that a run's admission gives."""


class AdmissionGate:
    """Admission of one run under one authority.

    Args:
        credentials: what `open` may ask for, by name.
    """

    def __init__(
        self, run_id: bytes, authority: Authority, credentials: Mapping[str, Credential] = CREDENTIALS
    ) -> None:
        self._run_id = run_id
        self._admission: Admission = authority.admission
        self._inviters = {*authority.roots, *authority.admission.inviters}
        self._revoked = frozenset(authority.revoked)
        self._allowed = frozenset(authority.admission.allowed)
        self._named = {"trainer": frozenset(authority.trainers), "validator": frozenset(authority.validators)}
        self._credentials = credentials

    def may_fetch(self, key: bytes, role: Role) -> bool:
        """Whether an announcement of this key, in this role, could be admitted: a look at the key alone."""
        if key in self._revoked:
            return False
        if role != "miner":
            return key in self._named[role]
        return self._admission.policy != "allowlist" or key in self._allowed

    def named(self, role: Role) -> list[bytes] | None:
        """The only keys that may have a role, ascending; None where anybody may."""
        if role == "miner":
            return sorted(self._allowed) if self._admission.policy == "allowlist" else None
        return sorted(self._named[role])

    def admit(self, announcement: Announcement, now_ms: float) -> None:
        """Return if an announcement, its signature checked, is admitted.

        Raises:
            AdmissionError: revoked, not named, not listed, not invited, expired, or without the proof that is asked
                for.
            ProtocolError: its proof is broken.
        """
        if announcement.run != self._run_id:
            raise AdmissionError("of another run", "announcement")
        if not self.may_fetch(announcement.key, announcement.role):
            raise AdmissionError(f"this key may not be a {announcement.role} of this run", "announcement")
        if announcement.expires_ms <= now_ms:
            raise AdmissionError("expired", "announcement")
        if announcement.role != "miner":
            return
        if self._admission.policy == "invite":
            self._check_invite(announcement, now_ms)
        elif self._admission.policy == "open" and self._admission.credential:
            self._check_credential(announcement, now_ms)

    def _check_invite(self, announcement: Announcement, now_ms: float) -> None:
        try:
            invite = open_signed(announcement.proof, Invite, self._inviters).record
        except ProtocolError as error:
            raise AdmissionError(f"no invitation by an inviter of this run ({error})", "announcement") from error
        if (invite.run, invite.key) != (self._run_id, announcement.key):
            raise AdmissionError("an invitation for another key or run", "announcement")
        if invite.expires_ms <= now_ms:
            raise AdmissionError("its invitation has expired", "announcement")

    def _check_credential(self, announcement: Announcement, now_ms: float) -> None:
        name = self._admission.credential
        credential = self._credentials.get(name)
        if credential is None:
            raise AdmissionError(
                f"this program does not know the credential {name!r} that the run asks for", "announcement"
            )
        credential.check(announcement, self._admission.difficulty, now_ms)


def lottery(salt: bytes, key: bytes) -> bytes:
    """The rank of a key where not all can count, lowest first: nobody can make a key that is always first."""
    return hashlib.sha256(salt + key).digest()
