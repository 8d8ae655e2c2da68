"""The command line of `grailnode keys` and `grailnode admit`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def _option_run(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--run", required=True, metavar="FILE", help="The run.toml of the run.")(function)


_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def keys() -> None:
    """Make, show, grant, replace and revoke keys.

    Root keys decide. Those that lie in the run's keys/ sign at once; for others a draft is written, which
    `grailnode keys sign` signs wherever a root key is kept, offline too, and `grailnode keys publish` publishes.
    """


@keys.command()
@click.argument("file", type=_FILE)
def new(file: Path) -> None:
    """Write a new secret key to FILE (mode 0600) and print its public key."""
    from grailnode.cli.authority_verbs import new_key  # noqa: PLC0415

    new_key(file)


@keys.command()
@_option_run
def show(run: str) -> None:
    """Print this machine's public keys and what they may do in the run."""
    from grailnode.cli.authority_verbs import show_keys  # noqa: PLC0415

    show_keys(run)


@keys.command()
@click.argument("name")
@_option_run
def rotate(name: str, run: str) -> None:
    """Put a new key in the place of NAME's, which is revoked."""
    from grailnode.cli.authority_verbs import rotate_key  # noqa: PLC0415

    rotate_key(run, name)


@keys.command()
@click.argument("key")
@_option_run
@click.option("--role", type=click.Choice(["validator", "inviter"]), default="validator", show_default=True)
def grant(key: str, run: str, role: str) -> None:
    """Make KEY (64 hexadecimal digits, or a key file) a validator of the run, or one who may invite miners."""
    from grailnode.cli.authority_verbs import grant_key  # noqa: PLC0415

    grant_key(run, key, role)


@keys.command()
@click.argument("validators", type=click.IntRange(1))
@_option_run
def quorum(validators: int, run: str) -> None:
    """Have so many VALIDATORS accept a group before the trainer learns from it."""
    from grailnode.cli.authority_verbs import set_quorum  # noqa: PLC0415

    set_quorum(run, validators)


@keys.command()
@click.argument("key")
@_option_run
@click.option("--rewind", type=click.IntRange(0), help="The last version that counts of a chain a thief went on with.")
def revoke(key: str, run: str, rewind: int | None) -> None:
    """Take every role from KEY (64 hexadecimal digits, or a key file), and refuse it from now on."""
    from grailnode.cli.authority_verbs import revoke_key  # noqa: PLC0415

    revoke_key(run, key, rewind)


@keys.command(name="sign")
@click.argument("draft", type=_FILE)
@click.argument("key", type=_FILE)
def sign_command(draft: Path, key: Path) -> None:
    """Show what DRAFT would change, and sign it with the root key of a file. Needs no network."""
    from grailnode.cli.authority_verbs import sign_draft  # noqa: PLC0415

    sign_draft(draft, key)


@keys.command()
@click.argument("draft", type=_FILE)
@_option_run
def publish(draft: Path, run: str) -> None:
    """Publish DRAFT, which enough root keys have signed."""
    from grailnode.cli.authority_verbs import publish_draft  # noqa: PLC0415

    publish_draft(run, draft)


@click.command()
@click.argument("key")
@_option_run
@click.option("--days", type=click.IntRange(1, 3650), default=30, show_default=True, help="That an invitation counts.")
@click.option("--key", "inviter", type=_FILE, help="Who invites. Default: a root or inviter key in the run's keys/.")
def admit(key: str, run: str, days: int, inviter: Path | None) -> None:
    """Let KEY (64 hexadecimal digits) mine: list it, or print an invitation, as the run's admission policy asks."""
    from grailnode.cli.authority_verbs import admit_key  # noqa: PLC0415

    admit_key(run, key, days, inviter)
