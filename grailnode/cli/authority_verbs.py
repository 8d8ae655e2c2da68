"""What `grailnode keys` and `grailnode admit` do."""

import time
from pathlib import Path

import click
import trio

from grailnode.cli.node import open_config
from grailnode.config import Config
from grailnode.node import admission_proof
from grailnode.node.processes import make_root_publisher
from grailnode.run import authority_drafts, key_files
from grailnode.run.authority_drafts import Draft, RevisionError
from grailnode.run.files import write_whole
from grailnode.store.local import LocalStore
from protocol import paths
from protocol.errors import ProtocolError
from protocol.identity.admission import Invite
from protocol.identity.authority import ChainPoint, Revision
from protocol.identity.signing import SigningKey, check_public_key, sign
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.trainer.publish.history import History


def _public(text: str) -> bytes:
    """A public key from 64 hexadecimal digits, or of a key file."""
    path = Path(text)
    if path.is_file():
        return SigningKey(key_files.read(path)).public
    try:
        return check_public_key(bytes.fromhex(text))
    except (ValueError, ProtocolError) as error:
        raise RevisionError(f"{text}: neither a public key (64 hexadecimal digits) nor a key file ({error})") from None


def _known(run: str) -> tuple[Config, Node]:
    """A run, and who may act in it as its store says now."""
    config = open_config(run)
    node = make_root_publisher(config)
    trio.run(refresh_authority, node)
    return config, node


def new_key(path: Path) -> None:
    """A new key file."""
    click.echo(f"{path}: {SigningKey(key_files.create(path)).public.hex()}")


def show_keys(run: str) -> None:
    """The keys of this machine, and what they may do."""
    config, node = _known(run)
    authority = node.authority
    click.echo(
        f"revision {node.revisions.number}; {authority.root_threshold} of {len(authority.roots)} roots must sign"
    )
    for path in key_files.listed(config.at(config.node.keys)):
        public = SigningKey(key_files.read(path)).public
        named = {"root": authority.roots, "trainer": authority.trainers, "validator": authority.validators}
        held = [role for role, of in named.items() if public in of]
        if public in authority.revoked:
            held = ["revoked"]
        click.echo(f"{path.stem:16} {public.hex()} {', '.join(held) or '-'}")


def rotate_key(run: str, name: str) -> None:
    """A new key in place of one of this machine's."""
    config, node = _known(run)
    directory = config.at(config.node.keys)
    path, coming = directory / f"{name}{key_files.SUFFIX}", directory / f"{name}.next{key_files.SUFFIX}"
    old = SigningKey(key_files.read(path)).public
    new = SigningKey(key_files.read(coming) if coming.exists() else key_files.create(coming)).public
    changes = authority_drafts.replaced(node.authority, old, new)
    draft = authority_drafts.propose(node.revisions, f"{name}: another key", **changes)
    click.echo(f"{coming}: {new.hex()}")
    _sign_and_publish(config, node, draft)
    click.echo(f"when it is published: stop {name}; mv {path} {path}.old; mv {coming} {path}; start {name}")


def grant_key(run: str, key: str, role: str) -> None:
    """A role for a key that somebody holds."""
    config, node = _known(run)
    public = _public(key)
    changes = authority_drafts.granted(node.authority, public, role)
    _sign_and_publish(
        config, node, authority_drafts.propose(node.revisions, f"{public.hex()[:16]} as {role}", **changes)
    )


def set_quorum(run: str, validators: int) -> None:
    """How many validators must accept a group."""
    config, node = _known(run)
    if validators == node.authority.quorum:
        raise RevisionError(f"{validators} of {len(node.authority.validators)} validators must accept already")
    if validators > len(node.authority.validators):
        raise RevisionError(
            f"{validators} of {len(node.authority.validators)} validators can never accept; `grailnode keys grant` adds one"
        )
    _sign_and_publish(
        config,
        node,
        authority_drafts.propose(node.revisions, f"{validators} validators must accept", quorum=validators),
    )


def revoke_key(run: str, key: str, rewind: int | None) -> None:
    """No role for a key any more."""
    config, node = _known(run)
    public = _public(key)
    point = trio.run(_point, config, rewind) if rewind is not None else None
    changes = authority_drafts.revoked(node.authority, public)
    draft = authority_drafts.propose(node.revisions, f"{public.hex()[:16]} is revoked", point, **changes)
    for name, before in (("quorum", node.authority.quorum), ("root_threshold", node.authority.root_threshold)):
        if changes[name] < before:
            click.echo(f"note: {name} falls from {before} to {changes[name]}, since no more keys are left", err=True)
    _sign_and_publish(config, node, draft)


async def _point(config: Config, version: int) -> ChainPoint:
    """A version as the trainer of this machine published it."""
    history = await History.open(LocalStore(config.at(config.node.state) / "trainer" / "objects"))
    if version not in history.manifests:
        known = ", ".join(map(str, sorted(history.manifests))) or "none"
        raise RevisionError(f"--rewind {version}: this machine's trainer did not publish it; it knows {known}")
    if version < history.published_version:
        raise RevisionError(
            f"--rewind {version}: this machine's trainer has published version {history.published_version} itself, and takes nothing back; "
            f"--rewind {history.published_version} takes back what others published with its key"
        )
    return ChainPoint(version=version, digest=history.manifests[version].digest)


def admit_key(run: str, key: str, days: int, inviter: Path | None) -> None:
    """A miner on the allowlist, or an invitation for it."""
    config, node = _known(run)
    public, authority = _public(key), node.authority
    if public in authority.revoked:
        raise RevisionError(f"{public.hex()} is revoked in this run")
    if authority.admission.policy == "open":
        click.echo("this run is open: everyone may mine, nobody needs to be admitted")
    elif authority.admission.policy == "allowlist":
        changes = authority_drafts.admitted(authority, public)
        _sign_and_publish(
            config, node, authority_drafts.propose(node.revisions, f"{public.hex()[:16]} may mine", **changes)
        )
    else:
        signer = _inviter(config, node, inviter)
        expires_ms = int((time.time() + days * 86_400) * 1000)
        token = sign(Invite(run=node.run_id, key=public, expires_ms=expires_ms), signer)
        click.echo(token.hex())
        click.echo(f"for {days} days; on the miner's machine it goes into keys/NAME{admission_proof.SUFFIX}", err=True)


def _inviter(config: Config, node: Node, path: Path | None) -> SigningKey:
    authority = node.authority
    may = {*authority.roots, *authority.admission.inviters}
    directory = config.at(config.node.keys)
    for candidate in [path] if path is not None else key_files.listed(directory):
        key = SigningKey(key_files.read(candidate))
        if key.public in may:
            return key
    raise RevisionError(f"{path or directory}: no key of an inviter or a root; name one with --key FILE")


def sign_draft(path: Path, key: Path) -> None:
    """Another signature on a draft; needs neither the run nor a network."""
    draft = authority_drafts.read_draft(path)
    for line in authority_drafts.describe(draft.revision):
        click.echo(line)
    draft = draft.signed_by(SigningKey(key_files.read(key)))
    write_whole(path, draft.to_bytes())
    click.echo(f"{path}: {len(draft.signatures)} signatures")


def publish_draft(run: str, path: Path) -> None:
    """A draft that enough roots have signed, for everybody."""
    _, node = _known(run)
    draft = authority_drafts.read_draft(path)
    draft, foreign = authority_drafts.without_strangers(draft, {*node.authority.roots, *draft.revision.authority.roots})
    for key in foreign:
        click.echo(f"{path}: the signature of {key.hex()} is left out: no root key of this run", err=True)
    lacking = authority_drafts.outstanding(draft, node.revisions)
    if lacking:
        raise RevisionError(f"{path}: {lacking}; `grailnode keys sign {path} KEYFILE`")
    _publish(node, draft)


def _sign_and_publish(config: Config, node: Node, draft: Draft) -> None:
    """Sign with the root keys at hand; publish if they are enough, else say where the draft is and what to do with it."""
    wanted = {*node.authority.roots, *draft.revision.authority.roots}
    draft = authority_drafts.sign_at_hand(draft, config.at(config.node.keys), wanted)
    for line in authority_drafts.describe(draft.revision):
        click.echo(line)
    lacking = authority_drafts.outstanding(draft, node.revisions)
    if not lacking:
        _publish(node, draft)
        return
    path = config.at(Path(f"revision-{draft.revision.number}{authority_drafts.SUFFIX}"))
    write_whole(path, draft.to_bytes())
    click.echo(f"{path}: {lacking}. Take it to each root key: grailnode keys sign {path.name} KEYFILE")
    click.echo(f"then: grailnode keys publish {path.name} --run RUN")


def _publish(node: Node, draft: Draft) -> None:
    """Check it as every node will, then put it at the meeting point."""
    signed = node.revisions.check(node.revisions.number + 1, draft.envelope())
    record: Revision = signed.record
    path = paths.revision(node.run_id, record.number)

    async def publish() -> bool:
        await node.publish(path, signed.data)
        return await node.is_readable(path, signed.data)

    if not trio.run(publish):
        raise RevisionError(
            f"{path}: storage took it and does not show it; nobody has it. Make the change again, and look at the bucket"
        )
    click.echo(f"revision {record.number} is published; every node obeys it at its next poll")
