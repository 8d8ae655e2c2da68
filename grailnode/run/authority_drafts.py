"""Drafts of revisions: a change of who may act in a run, signed one root key at a time, wherever these keys are kept.

A draft is a file with the bytes of the revision and the signatures so far. It is carried to each root key (on a stick
if need be) and back, and published when enough of them have signed.
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


class Draft(Record):
    """A revision that root keys have yet to sign: its bytes, and the signatures so far, in order of key."""

    kind: ClassVar[str] = "draft"
    max_bytes: ClassVar[int] = limits.MAX_RUN_BYTES + limits.MAX_ENVELOPE_BYTES
    body: bytes
    signatures: Annotated[tuple[Signature, ...], Field(max_length=limits.MAX_SIGNATURES)]

    @property
    def revision(self) -> Revision:
        return Revision.from_bytes(self.body)

    def signed_by(self, key: SigningKey) -> "Draft":
        """Return the draft with the signature of a key, which replaces an earlier one of the same key."""
        new_signatures = Envelope.from_bytes(sign(self.revision, key)).signatures
        others = [signature for signature in self.signatures if signature.key != key.public]
        signatures = sorted((*others, *new_signatures), key=lambda signature: signature.key)
        return Draft(body=self.body, signatures=tuple(signatures))

    def envelope(self) -> bytes:
        """Return the bytes to publish."""
        return Envelope(body=self.body, of=Revision.kind, signatures=self.signatures).to_bytes()


def propose(revisions: Revisions, note: str, rewind: ChainPoint | None = None, **changes: Any) -> Draft:
    """Return a draft of the next revision: the current authority with new values of its fields; UserError if these
    contradict each other. The note says why, for people. A rewind names the last version that counts of a chain that a
    thief continued with a key.
    """
    try:
        authority = Authority(**(dict(revisions.current) | changes))
        revision = Revision(
            run=revisions.run_id,
            number=revisions.number + 1,
            previous=revisions.digest,
            authority=authority,
            rewind=rewind,
            note=note,
        )
    except ValidationError as error:
        faults = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
        raise UserError(f"the change makes an impossible authority: {faults}") from error
    return Draft(body=revision.to_bytes(), signatures=())


def read_draft(path: Path) -> Draft:
    try:
        draft = Draft.from_bytes(path.read_bytes())
        draft.revision.authority.check_keys()
    except (OSError, ProtocolError) as error:
        raise UserError(f"{path}: not a draft of a revision ({error})") from error
    return draft


def sign_with_key_files(draft: Draft, directory: Path, authority: Authority) -> Draft:
    """Return the draft signed by every key file of a directory that is a root, before the revision or after it."""
    roots = {*authority.roots, *draft.revision.authority.roots}
    for path in key_files.list_key_files(directory):
        key = SigningKey(key_files.read(path))
        if key.public in roots:
            draft = draft.signed_by(key)
    return draft


def keep_root_signatures(draft: Draft, authority: Authority) -> tuple[Draft, list[bytes]]:
    """Drop signatures that are no root's, as a single one makes a revision invalid; return also whose they were."""
    roots = {*authority.roots, *draft.revision.authority.roots}
    root_signatures = tuple(signature for signature in draft.signatures if signature.key in roots)
    others = [signature.key for signature in draft.signatures if signature.key not in roots]
    return Draft(body=draft.body, signatures=root_signatures), others


def missing_signatures(draft: Draft, revisions: Revisions) -> str:
    """Return in words which signatures a draft lacks; empty when it can be published."""
    signers = {signature.key for signature in draft.signatures}
    before, after = revisions.current, draft.revision.authority
    authorities = [("", before)]
    if (after.roots, after.root_threshold) != (before.roots, before.root_threshold):
        authorities.append(("new ", after))
    parts = []
    for whose, authority in authorities:
        count = len(signers & set(authority.roots))
        if count < authority.root_threshold:
            parts.append(f"{count} of {authority.root_threshold} {whose}root keys have signed")
    return "; ".join(parts)


def describe(revision: Revision) -> list[str]:
    """Return what a revision changes, in lines to read before signing it."""
    authority, admission = revision.authority, revision.authority.admission
    lines = [
        f"revision {revision.number} of run {revision.run.hex()[:16]}, after {revision.previous.hex()[:16]}",
        f"note: {revision.note}",
        f"{authority.root_threshold} of these roots must sign the next: {_short(authority.roots)}",
        f"trainers: {_short(authority.trainers)}",
        f"validators, {authority.quorum} of which must accept: {_short(authority.validators)}",
        f"workers: {_short(authority.workers)}" if authority.workers else "",
        f"admission: {admission.policy}, at most {admission.miners} miners"
        + (f", credential {admission.credential} {admission.difficulty}" if admission.credential else ""),
        f"allowed: {_short(admission.allowed)}" if admission.policy == "allowlist" else "",
        f"inviters beside the roots: {_short(admission.inviters)}" if admission.policy == "invite" else "",
        f"revoked: {_short(authority.revoked)}",
        f"mirrors of the trainers' objects: {', '.join(authority.mirrors)}" if authority.mirrors else "",
    ]
    if revision.rewind is not None:
        point = revision.rewind
        lines.append(f"the chain counts up to version {point.version} ({point.digest.hex()[:16]}), and nothing beyond")
    return [line for line in lines if line]


def _short(keys: Collection[bytes]) -> str:
    return ", ".join(key.hex()[:16] for key in keys) or "none"
