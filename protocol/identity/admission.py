"""Admission: which announcements a node accepts (docs/spec/authority.md). No I/O.

An `AdmissionGate` applies the rules of one authority. `may_fetch` decides by a key alone, before anything is fetched;
`admit` decides by an announcement whose signature was checked.
"""

import hashlib
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from itertools import count
from typing import Annotated, ClassVar, Final

from pydantic import Field

from protocol import limits
from protocol.encoding import Record
from protocol.errors import AdmissionError, ProtocolError
from protocol.identity.authority import Admission, Authority
from protocol.identity.participant import Announcement, Role
from protocol.identity.signing import Digest, Key, open_signed

_KNOWN_PLACES: Final = 0.75
"""The share of the places that is kept for keys with a history, if there are so many of them."""
_WORK_DOMAIN: Final = b"grailnode/1 work"


class ProofOfWorkSolution(Record):
    """A nonce for which `work_digest` begins with enough zero bits; valid until `expires_ms` (Unix epoch)."""

    kind: ClassVar[str] = "work"
    expires_ms: Annotated[int, Field(ge=0, lt=1 << 53)]
    nonce: Annotated[int, Field(ge=0, lt=1 << 64)]


class Invite(Record):
    """A permission to mine for one key until `expires_ms` (since the Unix epoch), signed by an inviter or a root."""

    kind: ClassVar[str] = "invite"
    max_bytes: ClassVar[int] = limits.MAX_CREDENTIAL_BYTES
    run: Digest
    key: Key
    expires_ms: Annotated[int, Field(ge=0, lt=1 << 53)]


def work_digest(run_id: bytes, key: bytes, work: ProofOfWorkSolution) -> bytes:
    """Return the SHA-256 (32 bytes) of run, key and solution, by which a proof of work is measured."""
    tail = work.expires_ms.to_bytes(8, "little") + work.nonce.to_bytes(8, "little")
    return hashlib.sha256(_WORK_DOMAIN + run_id + key + tail).digest()


def leading_zero_bits(digest: bytes) -> int:
    """Count the zero bits before the first one bit; the most significant bit of the first byte comes first."""
    return 8 * len(digest) - int.from_bytes(digest, "big").bit_length()


def do_work(run_id: bytes, key: bytes, difficulty: int, expires_ms: int) -> ProofOfWorkSolution:
    """Find a proof of work in about 2^difficulty tries; it expires at some milliseconds since the Unix epoch."""
    solutions = (ProofOfWorkSolution.model_construct(expires_ms=expires_ms, nonce=nonce) for nonce in count())
    return next(work for work in solutions if leading_zero_bits(work_digest(run_id, key, work)) >= difficulty)


def check_work(announcement: Announcement, difficulty: int, now_ms: float) -> None:
    """Check (AdmissionError) that a proof of work was done, with its leading zero bits, and has not expired, nor
    expires too late, at a time in milliseconds since the Unix epoch. It is the credential of Hashcash, bound to run,
    key and time, so that every new key costs work.
    """
    work = ProofOfWorkSolution.from_bytes(announcement.credential)
    if not now_ms < work.expires_ms <= now_ms + limits.MAX_WORK_MS:
        raise AdmissionError("its proof of work has expired, or expires too far from now", "announcement")
    bits = leading_zero_bits(work_digest(announcement.run, announcement.key, work))
    if bits < difficulty:
        raise AdmissionError(f"its proof of work has {bits} zero bits of {difficulty}", "announcement")


class AdmissionGate:
    """The admission rules of one run under one authority."""

    def __init__(self, run_id: bytes, authority: Authority) -> None:
        self._run_id = run_id
        self._admission: Admission = authority.admission
        self._inviters = {*authority.roots, *authority.admission.inviters}
        self._revoked = frozenset(authority.revoked)
        self._miners = frozenset(authority.admission.allowed)
        self._keys = {
            "trainer": frozenset(authority.trainers),
            "worker": frozenset(authority.workers),
            "validator": frozenset(authority.validators),
        }

    def may_fetch(self, key: bytes, role: Role) -> bool:
        """Return whether an announcement of this key in this role could be admitted, as far as the key alone shows."""
        if key in self._revoked:
            return False
        if role != "miner":
            return key in self._keys[role]
        return self._admission.policy != "allowlist" or key in self._miners

    def eligible_keys(self, role: Role) -> list[bytes] | None:
        """Return the only keys that may have a role, ascending, or None if the authority does not list them."""
        if role == "miner":
            return sorted(self._miners) if self._admission.policy == "allowlist" else None
        return sorted(self._keys[role])

    def admit(self, announcement: Announcement, now_ms: float) -> None:
        """Check an announcement, whose signature was checked before, at a time in milliseconds since the Unix epoch:
        AdmissionError if its key is revoked, may not have the role or is not invited, or if it has expired or lacks the
        required credential.
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
        elif self._admission.policy == "open" and (name := self._admission.credential):
            if name != ProofOfWorkSolution.kind:
                unsupported = f"this program does not support the credential {name!r} that the run requires"
                raise AdmissionError(unsupported, "announcement")
            check_work(announcement, self._admission.difficulty, now_ms)

    def _check_invite(self, announcement: Announcement, now_ms: float) -> None:
        try:
            invite = open_signed(announcement.credential, Invite, self._inviters).record
        except ProtocolError as error:
            raise AdmissionError(f"no invitation by an inviter of this run ({error})", "announcement") from error
        if (invite.run, invite.key) != (self._run_id, announcement.key):
            raise AdmissionError("an invitation for another key or run", "announcement")
        if invite.expires_ms <= now_ms:
            raise AdmissionError("its invitation has expired", "announcement")


def lottery(salt: bytes, key: bytes) -> bytes:
    """Return the rank of a key in the selection of miners when there are too many; the lowest rank comes first. It
    changes with the salt, so nobody can make a key that always comes first.
    """
    return hashlib.sha256(salt + key).digest()


def draw_places(salt: bytes, keys: Iterable[bytes], history_keys: AbstractSet[bytes], places: int) -> list[bytes]:
    """Return the keys that get one of a number of places, in the order of the lottery; its salt is randomness that
    nobody knew when the keys were made.

    Three quarters of the places are kept for keys with a history, so that no crowd of new keys displaces those that
    have worked; all others, and known keys beyond that, draw for the rest. Places that one side leaves go to the other.
    """
    ordered_keys = sorted(keys, key=lambda key: lottery(salt, key))
    first = [key for key in ordered_keys if key in history_keys][: int(_KNOWN_PLACES * places)]
    first_keys = set(first)
    winners = {*first, *[key for key in ordered_keys if key not in first_keys][: places - len(first)]}
    return [key for key in ordered_keys if key in winners]
