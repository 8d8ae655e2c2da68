"""`grailnode keys` and `grailnode admit`: who may act in a run."""

from typing import Any

import click

from grailnode.cli.options import FILE, authority_option, run_action, shown_option


@click.group()
def keys() -> None:
    """Make, show, grant, replace and revoke keys.

    Root keys sign every change. Those in the run's keys/ sign at once; for others a draft is written, which
    `grailnode keys sign` signs wherever a root key is kept, offline too, and `grailnode keys publish` publishes.
    """


@keys.command()
@click.argument("file", type=FILE)
def new(**parameters: Any) -> None:
    """Write a new secret key to FILE (mode 0600) and print its public key."""
    run_action("key_changes", "new", parameters)


@keys.command()
@authority_option
def show(**parameters: Any) -> None:
    """Print this machine's public keys and what they may do in the run."""
    run_action("key_changes", "show", parameters)


@keys.command()
@click.argument("name")
@authority_option
def rotate(**parameters: Any) -> None:
    """Replace the key of NAME by a new one, and revoke the old one."""
    run_action("key_changes", "rotate", parameters)


@keys.command()
@click.argument("key")
@authority_option
@shown_option(
    "--role", type=click.Choice(["validator", "worker", "inviter"]), default="validator", help="What the key may do."
)
def grant(**parameters: Any) -> None:
    """Make KEY (64 hexadecimal digits, or a key file) a validator, a site that trains, or an inviter of miners."""
    run_action("key_changes", "grant", parameters)


@keys.command()
@click.argument("validators", type=click.IntRange(1))
@authority_option
def quorum(**parameters: Any) -> None:
    """Set how many VALIDATORS must accept a group before the trainer learns from it."""
    run_action("key_changes", "quorum", parameters)


@keys.command()
@click.argument("urls", nargs=-1, metavar="[URL]...")
@authority_option
def mirrors(**parameters: Any) -> None:
    """Name the URLs at which copies of the trainers' objects are served; none without any URL."""
    run_action("key_changes", "mirrors", parameters)


@keys.command()
@click.argument("key")
@authority_option
@click.option(
    "--rewind", type=click.IntRange(0), help="The last version that counts, where a thief has continued the chain."
)
def revoke(**parameters: Any) -> None:
    """Take every role from KEY (64 hexadecimal digits, or a key file), and refuse it from now on."""
    run_action("key_changes", "revoke", parameters)


@keys.command()
@click.argument("draft", type=FILE)
@click.argument("key", type=FILE)
def sign(**parameters: Any) -> None:
    """Show what DRAFT would change, and sign it with the root key of a file. Needs no network."""
    run_action("key_changes", "sign", parameters)


@keys.command()
@click.argument("draft", type=FILE)
@authority_option
def publish(**parameters: Any) -> None:
    """Publish DRAFT, which enough root keys have signed."""
    run_action("key_changes", "publish", parameters)


@click.command()
@click.argument("key")
@authority_option
@shown_option("--days", type=click.IntRange(1, 3650), default=30, help="Days for which an invitation is valid.")
@click.option(
    "--key",
    "inviter",
    type=FILE,
    help="Key file that signs an invitation. Default: a root or inviter key in the run's keys/.",
)
def admit(**parameters: Any) -> None:
    """Let KEY (64 hexadecimal digits) mine: list it, or print an invitation, as the run's admission policy asks."""
    run_action("key_changes", "admit", parameters)
