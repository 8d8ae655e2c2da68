"""`grailnode admit`: let a miner work in a run."""

from pathlib import Path

import click

from grailnode.cli.actions.drafts import open_authority, submit
from grailnode.node import admission_credential
from grailnode.run import authority_changes
from grailnode.run.authority_drafts import RevisionError, propose


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
        suffix = admission_credential.SUFFIX
        click.echo(f"for {days} days; on the miner's machine it goes into keys/NAME{suffix}", err=True)
