"""`grailnode keys new`, apart from the other verbs of keys, which read a run and import torch."""

from pathlib import Path

import click

from grailnode.run import key_files
from protocol.identity.signing import SigningKey


def new(file: Path) -> None:
    click.echo(f"{file}: {SigningKey(key_files.create(file)).public.hex()}")
