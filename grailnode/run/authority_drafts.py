"""Changing who may act in a run: drafts of revisions, signed one key at a time, wherever the root keys are kept.

A draft is a file: the revision's bytes, and the signatures so far. It travels to each root key (on a stick, if need be)
and back, and is published when enough have signed.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError

from grailnode import UserError
from grailnode.run import key_files
from protocol import limits
from protocol.encoding import Record
from protocol.errors import ProtocolError
from protocol.identity.authority import Authority, ChainPoint, Revision, Revisions
from protocol.identity.signing import Envelope, Signature, SigningKey, sign

SUFFIX = ".draft"


class RevisionError(UserError):
    """A change that cannot be made: says why, and what to do."""


class Draft(Record):
    """A revision on its way to the root keys: its bytes, and the signatures so far, in order of key."""

    kind: ClassVar[str] = "draft"
    max_bytes: ClassVar[int] = limits.MAX_RUN_BYTES + limits.MAX_ENVELOPE_BYTES
    body: bytes
    signatures: Annotated[tuple[Signature, ...], Field(max_length=limits.MAX_SIGNATURES)]

    @property
    def revision(self) -> Revision:
        """What is to be signed.

        Raises:
            ProtocolError: the file holds no revision.
        """
        return Revision.from_bytes(self.body)

    def signed_by(self, key: SigningKey) -> "Draft":
        """The draft with another signature."""
        made = Envelope.from_bytes(sign(self.revision, key)).signatures
        others = [one for one in self.signatures if one.key != key.public]
        return Draft(body=self.body, signatures=tuple(sorted((*others, *made), key=lambda one: one.key)))

    def envelope(self) -> bytes:
        """As it is published."""
        return Envelope(body=self.body, of=Revision.kind, signatures=self.signatures).to_bytes()


def read_draft(path: Path) -> Draft:
    """A draft from its file.

    Raises:
        RevisionError: it is none.
    """
    try:
        draft = Draft.from_bytes(path.read_bytes())
        draft.revision.authority.check_keys()
    except (OSError, ProtocolError) as error:
        raise RevisionError(f"{path}: not a draft of a revision ({error})") from error
    return draft


def propose(known: Revisions, note: str, rewind: ChainPoint | None = None, **changes: Any) -> Draft:
    """A draft of the next revision: the current authority with changes.

    Raises:
        RevisionError: the result contradicts itself.
    """
    try:
        authority = Authority(**(dict(known.current) | changes))
        record = Revision(
            run=known.run_id,
            number=known.number + 1,
            previous=known.digest,
            authority=authority,
            rewind=rewind,
            note=note,
        )
    except ValidationError as error:
        why = "; ".join(found["msg"].removeprefix("Value error, ") for found in error.errors())
        raise RevisionError(f"no such authority can be: {why}") from error
    return Draft(body=record.to_bytes(), signatures=())


def replaced(authority: Authority, old: bytes, new: bytes) -> dict[str, Any]:
    """The changes that put one key in another's place, in every role that it has; the old one is revoked.

    Raises:
        RevisionError: the old key has no role.
    """
    changes: dict[str, Any] = {}
    for role in ("roots", "trainers", "validators"):
        named = getattr(authority, role)
        if old in named:
            changes[role] = tuple(new if key == old else key for key in named)
    admission = authority.admission
    for role in ("allowed", "inviters"):
        named = getattr(admission, role)
        if old in named:
            admission = admission.model_copy(update={role: tuple(sorted({*named, new} - {old}))})
    if admission != authority.admission:
        changes["admission"] = admission
    if not changes:
        raise RevisionError(f"{old.hex()} has no role in this run; a miner of an open run just starts with another key")
    return changes | {"revoked": tuple(sorted({*authority.revoked, old}))}


def revoked(authority: Authority, key: bytes) -> dict[str, Any]:
    """The changes that take every role from a key, and revoke it.

    Raises:
        RevisionError: nobody would be left in one of its roles.
    """
    changes: dict[str, Any] = {}
    for role in ("roots", "trainers", "validators"):
        left = tuple(other for other in getattr(authority, role) if other != key)
        if not left:
            raise RevisionError(
                f"{key.hex()} is the only one of the {role}; name a successor with `grailnode keys rotate`, which revokes it, "
                "and then give this command again where it has a --rewind"
            )
        changes[role] = left
    admission = authority.admission
    rest = {
        role: tuple(other for other in getattr(admission, role) if other != key) for role in ("allowed", "inviters")
    }
    changes["admission"] = admission.model_copy(update=rest)
    changes["root_threshold"] = min(authority.root_threshold, len(changes["roots"]))
    changes["quorum"] = min(authority.quorum, len(changes["validators"]))
    return changes | {"revoked": tuple(sorted({*authority.revoked, key}))}


def granted(authority: Authority, key: bytes, role: str) -> dict[str, Any]:
    """The changes that give a key a role.

    Args:
        role: "validator" or "inviter".

    Raises:
        RevisionError: the key is revoked, or has the role.
    """
    if key in authority.revoked:
        raise RevisionError(f"{key.hex()} is revoked in this run for good; make another key")
    admission = authority.admission
    if key in (authority.validators if role == "validator" else admission.inviters):
        raise RevisionError(f"{key.hex()} is of the {role}s already")
    if role == "validator":
        return {"validators": (*authority.validators, key)}
    return {"admission": admission.model_copy(update={"inviters": tuple(sorted({*admission.inviters, key}))})}


def admitted(authority: Authority, key: bytes) -> dict[str, Any]:
    """The changes that put a key on the allowlist."""
    allowed = tuple(sorted({*authority.admission.allowed, key}))
    return {"admission": authority.admission.model_copy(update={"allowed": allowed})}


def sign_at_hand(draft: Draft, directory: Path, wanted: Collection[bytes]) -> Draft:
    """The draft signed by every key file of a directory that is one of the wanted keys.

    Raises:
        KeyFileError: a key file, or the directory, cannot be used.
    """
    for path in key_files.listed(directory):
        key = SigningKey(key_files.read(path))
        if key.public in wanted:
            draft = draft.signed_by(key)
    return draft


def without_strangers(draft: Draft, roots: Collection[bytes]) -> tuple[Draft, list[bytes]]:
    """The draft with the signatures of root keys alone, and the keys of the others, whose signatures would spoil it."""
    kept = tuple(one for one in draft.signatures if one.key in roots)
    return Draft(body=draft.body, signatures=kept), [one.key for one in draft.signatures if one.key not in roots]


def outstanding(draft: Draft, known: Revisions) -> str:
    """What a draft still lacks, in words; empty when it can be published."""
    signers = {signature.key for signature in draft.signatures}
    after = draft.revision.authority
    lacking = []
    for whose, authority in (("", known.current), ("new ", after)):
        if whose and (after.roots, after.root_threshold) == (known.current.roots, known.current.root_threshold):
            continue
        count = len(signers & set(authority.roots))
        if count < authority.root_threshold:
            lacking.append(f"{count} of {authority.root_threshold} {whose}root keys have signed")
    return "; ".join(lacking)


def describe(revision: Revision) -> list[str]:
    """What is being signed, a line each: read it before you sign."""
    authority, admission = revision.authority, revision.authority.admission
    lines = [
        f"revision {revision.number} of run {revision.run.hex()[:16]}, after {revision.previous.hex()[:16]}",
        f"note: {revision.note}",
        f"{authority.root_threshold} of these roots must sign the next: {_short(authority.roots)}",
        f"trainers: {_short(authority.trainers)}",
        f"validators, {authority.quorum} of which must accept: {_short(authority.validators)}",
        f"admission: {admission.policy}, at most {admission.miners} miners"
        + (f", credential {admission.credential} {admission.difficulty}" if admission.credential else ""),
        f"allowed: {_short(admission.allowed)}" if admission.policy == "allowlist" else "",
        f"inviters beside the roots: {_short(admission.inviters)}" if admission.policy == "invite" else "",
        f"revoked: {_short(authority.revoked)}",
    ]
    if revision.rewind is not None:
        point = revision.rewind
        lines.append(f"the chain counts up to version {point.version} ({point.digest.hex()[:16]}), and nothing beyond")
    return [line for line in lines if line]


def _short(named: Collection[bytes]) -> str:
    return ", ".join(key.hex()[:16] for key in named) or "none"
