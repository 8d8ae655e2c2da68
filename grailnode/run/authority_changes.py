"""Changes of who may act in a run: what `grailnode keys` and `grailnode admit` draft for the root keys to sign."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grailnode.run import key_files
from grailnode.run.authority_drafts import Draft, RevisionError, propose
from protocol.errors import ProtocolError
from protocol.identity.admission import Invite
from protocol.identity.authority import Authority, ChainPoint, Revisions
from protocol.identity.signing import SigningKey, check_public_key, sign
from roles.ports import ObjectStore
from roles.trainer.publish.history import History

_ROLES = {"root": "roots", "trainer": "trainers", "validator": "validators", "worker": "workers"}
_ASCENDING = ("workers",)  # a field in order of keys, that may be empty
_DAY_SECONDS = 86_400


@dataclass(frozen=True)
class KeyRow:
    """A key file of this machine: its name, its public key, and the roles of the key in the run."""

    name: str
    public: bytes
    roles: tuple[str, ...]


@dataclass(frozen=True)
class KeyRotation:
    """A draft that replaces the key of a file by a new one, which is in a file of its own."""

    draft: Draft
    file: Path
    new_file: Path
    new_key: bytes


def parse_public_key(text: str) -> bytes:
    """Return the public key of 64 hexadecimal digits, or of a key file.

    Raises:
        RevisionError: the text is neither.
        KeyFileError: the key file cannot be used.
    """
    path = Path(text)
    if path.is_file():
        return SigningKey(key_files.read(path)).public
    try:
        return check_public_key(bytes.fromhex(text))
    except (ValueError, ProtocolError) as error:
        raise RevisionError(f"{text}: neither a public key (64 hexadecimal digits) nor a key file ({error})") from None


def list_keys(authority: Authority, directory: Path) -> list[KeyRow]:
    """Return the key files of a directory, with the roles of their keys."""
    rows = []
    for path in key_files.list_key_files(directory):
        public = SigningKey(key_files.read(path)).public
        roles = tuple(role for role, field in _ROLES.items() if public in getattr(authority, field))
        rows.append(KeyRow(path.stem, public, ("revoked",) if public in authority.revoked else roles))
    return rows


def rotate_key(revisions: Revisions, directory: Path, name: str) -> KeyRotation:
    """Draft a new key in place of a key of this machine.

    Args:
        directory: of the key files; the new key is written to NAME.next.key, unless an earlier attempt has done so.
    """
    file, new_file = (directory / f"{stem}{key_files.SUFFIX}" for stem in (name, f"{name}.next"))
    key = SigningKey(key_files.read(file)).public
    new_key = SigningKey(key_files.read(new_file) if new_file.exists() else key_files.create(new_file)).public
    changes = replacement(revisions.current, key, new_key)
    return KeyRotation(propose(revisions, f"{name}: another key", **changes), file, new_file, new_key)


def grant_role(revisions: Revisions, key: bytes, role: str) -> Draft:
    """Draft a role for a key.

    Args:
        role: "validator", "worker" or "inviter".
    """
    return propose(revisions, f"{key.hex()[:16]} as {role}", **grant(revisions.current, key, role))


def change_quorum(revisions: Revisions, validators: int) -> Draft:
    """Draft how many validators must accept a group.

    Raises:
        RevisionError: it is so already, or there are not so many.
    """
    authority = revisions.current
    if validators == authority.quorum:
        raise RevisionError(f"{validators} of {len(authority.validators)} validators must accept already")
    if validators > len(authority.validators):
        raise RevisionError(
            f"{validators} of {len(authority.validators)} validators can never accept; `grailnode keys grant` adds one"
        )
    return propose(revisions, f"{validators} validators must accept", quorum=validators)


def revoke_key(revisions: Revisions, key: bytes, rewind: ChainPoint | None = None) -> Draft:
    """Draft the revocation of a key.

    Args:
        rewind: the last version that counts of a chain that a thief continued with the key.
    """
    return propose(revisions, f"{key.hex()[:16]} is revoked", rewind, **revocation(revisions.current, key))


def lowered_thresholds(revisions: Revisions, draft: Draft) -> list[tuple[str, int, int]]:
    """Return the thresholds that a draft lowers: (field of the authority, value before, value after)."""
    after = draft.revision.authority
    thresholds = ("quorum", "root_threshold")
    values = [(name, getattr(revisions.current, name), getattr(after, name)) for name in thresholds]
    return [row for row in values if row[2] < row[1]]


async def rewind_point(objects: ObjectStore, version: int, revoked: bytes) -> ChainPoint:
    """Return the point of the chain at a version that the trainer of this machine published.

    Args:
        objects: the trainer's state.
        revoked: the key that is revoked.

    Raises:
        RevisionError: it did not publish the version, or published later ones under the key that is revoked.
    """
    history = await History.open(objects)
    if version not in history.manifests:
        versions = ", ".join(map(str, sorted(history.manifests))) or "none"
        raise RevisionError(f"--rewind {version}: this machine's trainer did not publish it; it knows {versions}")
    newest = history.published_version
    if version < newest and history.writer == revoked:
        raise RevisionError(
            f"--rewind {version}: this machine's trainer has published version {newest} itself, and cannot take its "
            f"own versions back; --rewind {newest} takes back what others published with its key"
        )
    return ChainPoint(version=version, digest=history.manifests[version].digest)


def admit_miner(revisions: Revisions, key: bytes) -> Draft:
    """Draft a miner's place on the allowlist."""
    return propose(revisions, f"{key.hex()[:16]} may mine", **permission(revisions.current, key))


def invite_miner(revisions: Revisions, key: bytes, days: int, inviter: Path | None, directory: Path) -> bytes:
    """Return an invitation for a miner.

    Args:
        days: for which it is valid.
        inviter: the key file that signs; None for the first of a directory that may invite.

    Raises:
        RevisionError: no key may invite.
        KeyFileError: a key file, or the directory, cannot be used.
    """
    authority = revisions.current
    for path in key_files.list_key_files(directory) if inviter is None else [inviter]:
        signer = SigningKey(key_files.read(path))
        if signer.public in {*authority.roots, *authority.admission.inviters}:
            expires_ms = int((time.time() + days * _DAY_SECONDS) * 1000)
            return sign(Invite(run=revisions.run_id, key=key, expires_ms=expires_ms), signer)
    raise RevisionError(f"{inviter or directory}: no key of an inviter or a root; name one with --key FILE")


def replacement(authority: Authority, key: bytes, new_key: bytes) -> dict[str, Any]:
    """Return the changes that put a new key in another's place in every role, and revoke the other.

    Raises:
        RevisionError: the key has no role.
    """
    changes: dict[str, Any] = {}
    for field in _ROLES.values():
        keys = getattr(authority, field)
        if key in keys:
            keys = tuple(new_key if other == key else other for other in keys)
            changes[field] = tuple(sorted(keys)) if field in _ASCENDING else keys
    admission = authority.admission
    for field in ("allowed", "inviters"):
        keys = getattr(admission, field)
        if key in keys:
            admission = admission.model_copy(update={field: tuple(sorted({*keys, new_key} - {key}))})
    if admission != authority.admission:
        changes["admission"] = admission
    if not changes:
        raise RevisionError(f"{key.hex()} has no role in this run; a miner of an open run just starts with another key")
    return changes | {"revoked": tuple(sorted({*authority.revoked, key}))}


def revocation(authority: Authority, key: bytes) -> dict[str, Any]:
    """Return the changes that take every role from a key, and revoke it.

    Raises:
        RevisionError: nobody would be left in one of its roles.
    """
    changes: dict[str, Any] = {}
    for field in _ROLES.values():
        others = tuple(other for other in getattr(authority, field) if other != key)
        if not others and field not in _ASCENDING:
            raise RevisionError(
                f"{key.hex()} is the only one of the {field}; name a successor with `grailnode keys rotate`, which "
                "revokes it, and then give this command again where it has a --rewind"
            )
        changes[field] = others
    admission = authority.admission
    rest = {
        field: tuple(other for other in getattr(admission, field) if other != key) for field in ("allowed", "inviters")
    }
    changes["admission"] = admission.model_copy(update=rest)
    changes["root_threshold"] = min(authority.root_threshold, len(changes["roots"]))
    changes["quorum"] = min(authority.quorum, len(changes["validators"]))
    return changes | {"revoked": tuple(sorted({*authority.revoked, key}))}


def grant(authority: Authority, key: bytes, role: str) -> dict[str, Any]:
    """Return the changes that give a key a role.

    Args:
        role: "validator", "worker" or "inviter".

    Raises:
        RevisionError: the key is revoked, or has the role.
    """
    if key in authority.revoked:
        raise RevisionError(f"{key.hex()} is revoked in this run for good; make another key")
    admission = authority.admission
    if key in {"validator": authority.validators, "worker": authority.workers, "inviter": admission.inviters}[role]:
        raise RevisionError(f"{key.hex()} has the role {role} already")
    if role == "validator":
        return {"validators": (*authority.validators, key)}
    if role == "worker":
        return {"workers": tuple(sorted((*authority.workers, key)))}
    return {"admission": admission.model_copy(update={"inviters": tuple(sorted({*admission.inviters, key}))})}


def permission(authority: Authority, key: bytes) -> dict[str, Any]:
    """Return the changes that put a key on the allowlist."""
    allowlist = tuple(sorted({*authority.admission.allowed, key}))
    return {"admission": authority.admission.model_copy(update={"allowed": allowlist})}
