"""Changes of who may act in a run: what `grailnode keys` and `grailnode admit` draft for the root keys to sign."""

import re
import time
from pathlib import Path
from typing import Any

from grailnode import UserError
from grailnode.run import key_files
from protocol.errors import ProtocolError
from protocol.identity.admission import Invite
from protocol.identity.authority import Authority, ChainPoint, Revisions
from protocol.identity.signing import SigningKey, check_public_key, sign
from roles.ports import ObjectStore
from roles.trainer.publish.history import History

_ROLES = {"root": "roots", "trainer": "trainers", "validator": "validators", "worker": "workers"}
_DAY_SECONDS = 86_400


def parse_public_key(text: str) -> bytes:
    """Return the public key of 64 hexadecimal digits, or of a key file; UserError if the text is neither."""
    path = Path(text)
    if path.is_file():
        return SigningKey(key_files.read(path)).public
    if re.fullmatch(r"[0-9a-fA-F]{64}", text) is None:
        raise UserError(f"{text}: neither a public key (64 hexadecimal digits) nor a key file")
    try:
        return check_public_key(bytes.fromhex(text))
    except ProtocolError as error:
        raise UserError(f"{text}: no public key ({error})") from None


def list_keys(authority: Authority, directory: Path) -> list[tuple[str, bytes, tuple[str, ...]]]:
    """Return (name, public key, roles of the key in the run) of each key file of a directory."""
    rows = []
    for path in key_files.list_key_files(directory):
        public = SigningKey(key_files.read(path)).public
        roles = tuple(role for role, field in _ROLES.items() if public in getattr(authority, field))
        rows.append((path.stem, public, ("revoked",) if public in authority.revoked else roles))
    return rows


async def rewind_point(objects: ObjectStore, version: int, revoked: bytes) -> ChainPoint:
    """Return the point of the chain at a version that the trainer with this state published; UserError if it did
    not, or published later ones under the revoked key.
    """
    history = await History.open(objects)
    if version not in history.manifests:
        versions = ", ".join(map(str, sorted(history.manifests))) or "none"
        raise UserError(f"--rewind {version}: this machine's trainer did not publish it; it knows {versions}")
    newest = history.published_version
    if version < newest and history.writer == revoked:
        raise UserError(
            f"--rewind {version}: this machine's trainer has published version {newest} itself, and cannot take its "
            f"own versions back; --rewind {newest} takes back what others published with its key"
        )
    return ChainPoint(version=version, digest=history.manifests[version].digest)


def invite_miner(revisions: Revisions, key: bytes, days: int, inviter: Path | None, directory: Path) -> bytes:
    """Return an invitation for a miner, valid for so many days and signed by the inviter's key file, or else by the
    first of a directory that may invite; UserError if no key may.
    """
    authority = revisions.current
    for path in key_files.list_key_files(directory) if inviter is None else [inviter]:
        signer = SigningKey(key_files.read(path))
        if signer.public in {*authority.roots, *authority.admission.inviters}:
            expires_ms = int((time.time() + days * _DAY_SECONDS) * 1000)
            return sign(Invite(run=revisions.run_id, key=key, expires_ms=expires_ms), signer)
    raise UserError(f"{inviter or directory}: no key of an inviter or a root; name one with --key FILE")


def replacement(authority: Authority, key: bytes, new_key: bytes) -> dict[str, Any]:
    """Return the changes that replace a key in every role and revoke it; UserError if it has none."""
    changes = _with_others(authority, key, (new_key,))
    if all(value == getattr(authority, field) for field, value in changes.items()):
        raise UserError(f"{key.hex()} has no role in this run; a miner of an open run just starts with another key")
    return changes | {"revoked": tuple(sorted({*authority.revoked, key}))}


def revocation(authority: Authority, key: bytes) -> dict[str, Any]:
    """Return the changes that revoke a key, and take its roles; UserError if nobody else is in one of them."""
    changes = _with_others(authority, key, ())
    for field in _ROLES.values():
        if not changes[field] and field != "workers":
            raise UserError(
                f"{key.hex()} is the only one of the {field}; name a successor with `grailnode keys rotate`, which "
                "revokes it, and then give this command again where it has a --rewind"
            )
    changes["root_threshold"] = min(authority.root_threshold, len(changes["roots"]))
    changes["quorum"] = min(authority.quorum, len(changes["validators"]))
    return changes | {"revoked": tuple(sorted({*authority.revoked, key}))}


def _with_others(authority: Authority, key: bytes, others: tuple[bytes, ...]) -> dict[str, Any]:
    """Return the lists of keys by field, with other keys in the place of one."""

    def changed(keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return tuple(new for old in keys for new in (others if old == key else (old,)))

    changes: dict[str, Any] = {field: changed(getattr(authority, field)) for field in _ROLES.values()}
    changes["workers"] = tuple(sorted(changes["workers"]))
    admission = authority.admission
    lists = {field: tuple(sorted({*changed(getattr(admission, field))})) for field in ("allowed", "inviters")}
    return changes | {"admission": admission.model_copy(update=lists)}


def grant(authority: Authority, key: bytes, role: str) -> dict[str, Any]:
    """Return the changes that make a key a "validator", "worker" or "inviter"; UserError if that cannot be."""
    if key in authority.revoked:
        raise UserError(f"{key.hex()} is revoked in this run for good; make another key")
    admission = authority.admission
    if key in {"validator": authority.validators, "worker": authority.workers, "inviter": admission.inviters}[role]:
        raise UserError(f"{key.hex()} has the role {role} already")
    if role == "validator":
        return {"validators": (*authority.validators, key)}
    if role == "worker":
        return {"workers": tuple(sorted((*authority.workers, key)))}
    return {"admission": admission.model_copy(update={"inviters": tuple(sorted({*admission.inviters, key}))})}
