"""What `grailnode keys` and `grailnode admit` do."""

import re
from pathlib import Path

import click
import trio

from grailnode import UserError
from grailnode.cli.actions.offline_keys import print_revision
from grailnode.config import Config
from grailnode.node.admission_credential import SUFFIX
from grailnode.node.node_makers import make_root_publisher
from grailnode.run import authority_changes, authority_drafts, key_files
from grailnode.run.authority_drafts import Draft, propose
from grailnode.run.files import write_whole
from grailnode.run.joining import open_config
from grailnode.store.state.state_store import StateStore
from protocol import paths
from protocol.identity.participant import SPACE_FORM
from protocol.identity.signing import SigningKey
from protocol.limits import MAX_SPACE_BYTES
from roles.authority_updates import refresh_authority
from roles.node.identity import Node


def show(run: str) -> None:
    config, node = _open_authority(run)
    authority = node.authority
    click.echo(
        f"revision {node.revisions.number}; {authority.root_threshold} of {len(authority.roots)} roots must sign"
    )
    for name, public, roles in authority_changes.list_keys(authority, config.at(config.node.keys)):
        click.echo(f"{name:16} {public.hex()} {', '.join(roles) or '-'}")


def rotate(name: str, run: str) -> None:
    config, node = _open_authority(run)
    directory = config.at(config.node.keys)
    file, new_file = (directory / f"{stem}{key_files.SUFFIX}" for stem in (name, f"{name}.next"))
    key = SigningKey(key_files.read(file)).public
    new_key = key_files.read_or_create(new_file).public
    changes = authority_changes.replacement(node.authority, key, new_key)
    draft = propose(node.revisions, f"{name}: another key", **changes)
    click.echo(f"{new_file}: {new_key.hex()}")
    _submit(config, node, draft)
    click.echo(f"when it is published: stop {name}; mv {file} {file}.old; mv {new_file} {file}; start {name}")


def grant(key: str, run: str, role: str) -> None:
    config, node = _open_authority(run)
    public = authority_changes.parse_public_key(key)
    if role == "worker" and (refusal := node.run.sites_refusal):
        raise UserError(f"--role worker: {refusal}")
    changes = authority_changes.grant(node.authority, public, role)
    _submit(config, node, propose(node.revisions, f"{public.hex()[:16]} as {role}", **changes))


def quorum(validators: int, run: str) -> None:
    config, node = _open_authority(run)
    share = f"{validators} of {len(node.authority.validators)} validators"
    if validators == node.authority.quorum:
        raise UserError(f"{share} must accept already")
    if validators > len(node.authority.validators):
        raise UserError(f"{share} can never accept; `grailnode keys grant` adds one")
    _submit(config, node, propose(node.revisions, f"{validators} validators must accept", quorum=validators))


def mirrors(urls: tuple[str, ...], run: str) -> None:
    config, node = _open_authority(run)
    mirrors = tuple(sorted({url.rstrip("/") for url in urls}))
    for url in mirrors:
        if not re.fullmatch(SPACE_FORM, url) or len(url) > MAX_SPACE_BYTES:
            raise UserError(f"{url}: give https://host[:port][/path], host in lower case, without user or query")
    _submit(config, node, propose(node.revisions, f"{len(mirrors)} mirrors", mirrors=mirrors))


def revoke(key: str, run: str, rewind: int | None) -> None:
    config, node = _open_authority(run)
    public = authority_changes.parse_public_key(key)
    point = None
    if rewind is not None:
        objects = StateStore(config.at(config.node.state) / "trainer" / "objects", node.run_id)
        point = trio.run(authority_changes.rewind_point, objects, rewind, public)
    changes = authority_changes.revocation(node.authority, public)
    draft = propose(node.revisions, f"{public.hex()[:16]} is revoked", point, **changes)
    for name in ("quorum", "root_threshold"):
        before, after = getattr(node.authority, name), changes[name]
        if after < before:
            click.echo(f"note: {name} falls from {before} to {after}, since no more keys are left", err=True)
    _submit(config, node, draft)


def publish(draft: Path, run: str) -> None:
    _, node = _open_authority(run)
    content, others = authority_drafts.keep_root_signatures(authority_drafts.read_draft(draft), node.authority)
    for key in others:
        click.echo(f"{draft}: the signature of {key.hex()} is left out: it is no root key of this run", err=True)
    shortfall = authority_drafts.missing_signatures(content, node.revisions)
    if shortfall:
        raise UserError(f"{draft}: {shortfall}; `grailnode keys sign {draft} KEYFILE`")
    _publish(node, content)


def admit(key: str, run: str, days: int, inviter: Path | None) -> None:
    config, node = _open_authority(run)
    miner, authority = authority_changes.parse_public_key(key), node.authority
    if miner in authority.revoked:
        raise UserError(f"{miner.hex()} is revoked in this run")
    if authority.admission.policy == "open":
        click.echo("this run is open: everyone may mine, nobody needs to be admitted")
    elif authority.admission.policy == "allowlist":
        allowed = tuple(sorted({*authority.admission.allowed, miner}))
        admission = authority.admission.model_copy(update={"allowed": allowed})
        _submit(config, node, propose(node.revisions, f"{miner.hex()[:16]} may mine", admission=admission))
    else:
        directory = config.at(config.node.keys)
        token = authority_changes.invite_miner(node.revisions, miner, days, inviter, directory)
        click.echo(token.hex())
        click.echo(f"for {days} days; on the miner's machine it goes into keys/NAME{SUFFIX}", err=True)


def _open_authority(run: str) -> tuple[Config, Node]:
    """Return a run's configuration, and a node that knows who may act in the run as its store says now."""
    config = open_config(run)
    node = make_root_publisher(config)
    trio.run(refresh_authority, node)
    return config, node


def _submit(config: Config, node: Node, draft: Draft) -> None:
    """Sign a draft with the root keys at hand; publish it if they are enough, else print what to do with its file."""
    draft = authority_drafts.sign_with_key_files(draft, config.at(config.node.keys), node.authority)
    print_revision(draft)
    shortfall = authority_drafts.missing_signatures(draft, node.revisions)
    if not shortfall:
        _publish(node, draft)
        return
    path = config.directory / f"revision-{draft.revision.number}.draft"
    write_whole(path, draft.to_bytes())
    click.echo(f"{path}: {shortfall}. Take it to each root key: grailnode keys sign {path.name} KEYFILE")
    click.echo(f"then: grailnode keys publish {path.name} --run RUN")


def _publish(node: Node, draft: Draft) -> None:
    """Check a draft as every node will, and publish it at the meeting point; UserError if storage acknowledged it
    and does not show it.
    """
    revision = node.revisions.check(node.revisions.number + 1, draft.envelope())
    path = paths.revision(node.run_id, revision.record.number)

    async def put() -> bool:
        await node.publish(path, revision.data)
        return await node.is_readable(path, revision.data)

    if not trio.run(put):
        raise UserError(
            f"{path}: storage took it and does not show it; nobody has it. Make the change again, and look at the "
            "bucket"
        )
    click.echo(f"revision {revision.record.number} is published; every node obeys it within two minutes")
