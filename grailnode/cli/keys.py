"""`grailnode keys` and `grailnode admit`: who may act in a run."""

import click

from grailnode.cli.options import FILE, authority_option, shown_option, verb


@click.group()
def keys() -> None:
    """Make, show, grant, replace and revoke keys.

    Root keys sign every change. Those in the run's keys/ sign at once; for others a draft is written, which
    `grailnode keys sign` signs wherever a root key is kept, offline too, and `grailnode keys publish` publishes.
    """


@verb("offline_keys.new", keys)
@click.argument("file", type=FILE)
def _new() -> None:
    """Write a new secret key to FILE (mode 0600) and print its public key."""


@verb("key_changes.show", keys)
@authority_option
def _show() -> None:
    """Print this machine's public keys and what they may do in the run."""


@verb("key_changes.rotate", keys)
@click.argument("name")
@authority_option
def _rotate() -> None:
    """Replace the key of NAME by a new one, and revoke the old one."""


@verb("key_changes.grant", keys)
@click.argument("key")
@authority_option
@shown_option(
    "--role", type=click.Choice(["validator", "worker", "inviter"]), default="validator", help="What the key may do."
)
def _grant() -> None:
    """Make KEY (64 hexadecimal digits, or a key file) a validator, a site that trains, or an inviter of miners."""


@verb("key_changes.quorum", keys)
@click.argument("validators", type=click.IntRange(1))
@authority_option
def _quorum() -> None:
    """Set how many VALIDATORS must accept a group before the trainer learns from it."""


@verb("key_changes.mirrors", keys)
@click.argument("urls", nargs=-1, metavar="[URL]...")
@authority_option
def _mirrors() -> None:
    """Name the URLs at which copies of the trainers' objects are served; none without any URL."""


@verb("key_changes.revoke", keys)
@click.argument("key")
@authority_option
@click.option(
    "--rewind", type=click.IntRange(0), help="The last version that counts, where a thief has continued the chain."
)
def _revoke() -> None:
    """Take every role from KEY (64 hexadecimal digits, or a key file), and refuse it from now on."""


@verb("offline_keys.sign", keys)
@click.argument("draft", type=FILE)
@click.argument("key", type=FILE)
def _sign() -> None:
    """Show what DRAFT would change, and sign it with the root key of a file. Needs no network."""


@verb("key_changes.publish", keys)
@click.argument("draft", type=FILE)
@authority_option
def _publish() -> None:
    """Publish DRAFT, which enough root keys have signed."""


@verb("key_changes.admit")
@click.argument("key")
@authority_option
@shown_option("--days", type=click.IntRange(1, 3650), default=30, help="Days for which an invitation is valid.")
@click.option(
    "--key",
    "inviter",
    type=FILE,
    help="Key file that signs an invitation. Default: a root or inviter key in the run's keys/.",
)
def admit() -> None:
    """Let KEY (64 hexadecimal digits) mine: list it, or print an invitation, as the run's admission policy asks."""
