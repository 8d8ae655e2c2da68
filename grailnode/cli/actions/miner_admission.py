"""`grailnode admit`: let a miner work in a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from grailnode.cli.actions.drafts import open_authority, submit
from grailnode.node import admission_credential
from grailnode.run import authority_changes
from grailnode.run.authority_drafts import RevisionError


@dataclass(frozen=True)
class Options:
    """The options of the command: the miner's key, and for an invitation, its days and the key file that signs it."""

    key: str
    run: str
    days: int
    inviter: Path | None


def admit(**parameters: Any) -> None:
    """Run `grailnode admit`."""
    admit_miner(Options(**parameters))


def admit_miner(options: Options) -> None:
    """Draft a miner's place on the allowlist, or print an invitation.

    Raises:
        RevisionError: the miner is revoked, or no key of this machine may invite.
    """
    config, node = open_authority(options.run)
    key, authority = authority_changes.parse_public_key(options.key), node.authority
    if key in authority.revoked:
        raise RevisionError(f"{key.hex()} is revoked in this run")
    if authority.admission.policy == "open":
        click.echo("this run is open: everyone may mine, nobody needs to be admitted")
    elif authority.admission.policy == "allowlist":
        submit(config, node, authority_changes.admit_miner(node.revisions, key))
    else:
        directory = config.at(config.node.keys)
        token = authority_changes.invite_miner(node.revisions, key, options.days, options.inviter, directory)
        click.echo(token.hex())
        click.echo(
            f"for {options.days} days; on the miner's machine it goes into keys/NAME{admission_credential.SUFFIX}",
            err=True,
        )
