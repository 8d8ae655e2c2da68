"""What `grailnode keys` and `grailnode admit` do."""

import re
from pathlib import Path

import click
import trio

from grailnode.cli.actions import drafts
from grailnode.cli.actions.drafts import open_authority, print_revision, submit
from grailnode.node.admission_credential import SUFFIX
from grailnode.run import authority_changes, authority_drafts, key_files
from grailnode.run.authority_drafts import RevisionError, propose
from grailnode.run.files import write_whole
from grailnode.store.state.state_store import StateStore
from protocol.identity.participant import SPACE_FORM
from protocol.identity.signing import SigningKey
from protocol.limits import MAX_SPACE_BYTES


def new(file: Path) -> None:
    """Write a new secret key to FILE (mode 0600) and print its public key."""
    click.echo(f"{file}: {SigningKey(key_files.create(file)).public.hex()}")


def show(run: str) -> None:
    """Print this machine's public keys and what they may do in the run."""
    config, node = open_authority(run)
    authority = node.authority
    click.echo(
        f"revision {node.revisions.number}; {authority.root_threshold} of {len(authority.roots)} roots must sign"
    )
    for name, public, roles in authority_changes.list_keys(authority, config.at(config.node.keys)):
        click.echo(f"{name:16} {public.hex()} {', '.join(roles) or '-'}")


def rotate(name: str, run: str) -> None:
    """Replace the key of NAME by that in NAME.next.key, which is made unless an earlier attempt has made it."""
    config, node = open_authority(run)
    directory = config.at(config.node.keys)
    file, new_file = (directory / f"{stem}{key_files.SUFFIX}" for stem in (name, f"{name}.next"))
    key = SigningKey(key_files.read(file)).public
    new_key = key_files.read_or_create(new_file).public
    changes = authority_changes.replacement(node.authority, key, new_key)
    draft = propose(node.revisions, f"{name}: another key", **changes)
    click.echo(f"{new_file}: {new_key.hex()}")
    submit(config, node, draft)
    click.echo(f"when it is published: stop {name}; mv {file} {file}.old; mv {new_file} {file}; start {name}")


def grant(key: str, run: str, role: str) -> None:
    """Make KEY (64 hexadecimal digits, or a key file) a validator, a site that trains, or an inviter of miners."""
    config, node = open_authority(run)
    public = authority_changes.parse_public_key(key)
    if role == "worker" and (refusal := node.run.sites_refusal):
        raise RevisionError(f"--role worker: {refusal}")
    changes = authority_changes.grant(node.authority, public, role)
    submit(config, node, propose(node.revisions, f"{public.hex()[:16]} as {role}", **changes))


def quorum(validators: int, run: str) -> None:
    """Set how many VALIDATORS must accept a group before the trainer learns from it."""
    config, node = open_authority(run)
    submit(config, node, authority_changes.change_quorum(node.revisions, validators))


def mirrors(urls: tuple[str, ...], run: str) -> None:
    """Name the URLs at which copies of the trainers' objects are served."""
    config, node = open_authority(run)
    mirrors = tuple(sorted({url.rstrip("/") for url in urls}))
    for url in mirrors:
        if not re.fullmatch(SPACE_FORM, url) or len(url) > MAX_SPACE_BYTES:
            raise RevisionError(f"{url}: give https://host[:port][/path], host in lower case, without user or query")
    submit(config, node, propose(node.revisions, f"{len(mirrors)} mirrors", mirrors=mirrors))


def revoke(key: str, run: str, rewind: int | None) -> None:
    """Take every role from KEY (64 hexadecimal digits, or a key file), and refuse it from now on."""
    config, node = open_authority(run)
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
    submit(config, node, draft)


def sign(draft: Path, key: Path) -> None:
    """Show what DRAFT would change, and sign it with the root key of a file. Needs no network."""
    unsigned = authority_drafts.read_draft(draft)
    print_revision(unsigned)
    signed = unsigned.signed_by(SigningKey(key_files.read(key)))
    write_whole(draft, signed.to_bytes())
    click.echo(f"{draft}: {len(signed.signatures)} signatures")


def publish(draft: Path, run: str) -> None:
    """Publish DRAFT, which enough root keys have signed."""
    _, node = open_authority(run)
    content, others = authority_drafts.keep_root_signatures(authority_drafts.read_draft(draft), node.authority)
    for key in others:
        click.echo(f"{draft}: the signature of {key.hex()} is left out: it is no root key of this run", err=True)
    shortfall = authority_drafts.missing_signatures(content, node.revisions)
    if shortfall:
        raise RevisionError(f"{draft}: {shortfall}; `grailnode keys sign {draft} KEYFILE`")
    drafts.publish(node, content)


def admit(key: str, run: str, days: int, inviter: Path | None) -> None:
    """Draft a miner's place on the allowlist, or print an invitation, signed by a key of this machine that may."""
    config, node = open_authority(run)
    miner, authority = authority_changes.parse_public_key(key), node.authority
    if miner in authority.revoked:
        raise RevisionError(f"{miner.hex()} is revoked in this run")
    if authority.admission.policy == "open":
        click.echo("this run is open: everyone may mine, nobody needs to be admitted")
    elif authority.admission.policy == "allowlist":
        changes = authority_changes.permission(authority, miner)
        submit(config, node, propose(node.revisions, f"{miner.hex()[:16]} may mine", **changes))
    else:
        directory = config.at(config.node.keys)
        token = authority_changes.invite_miner(node.revisions, miner, days, inviter, directory)
        click.echo(token.hex())
        click.echo(f"for {days} days; on the miner's machine it goes into keys/NAME{SUFFIX}", err=True)
