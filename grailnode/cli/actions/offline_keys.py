"""`grailnode keys new` and `sign`, apart from the other verbs of keys, which read a run and import torch."""

from pathlib import Path

import click

from grailnode.run import authority_drafts, key_files
from grailnode.run.authority_drafts import Draft
from grailnode.run.files import write_whole
from protocol.identity.signing import SigningKey


def new(file: Path) -> None:
    click.echo(f"{file}: {SigningKey(key_files.create(file)).public.hex()}")


def sign(draft: Path, key: Path) -> None:
    unsigned = authority_drafts.read_draft(draft)
    print_revision(unsigned)
    signed = unsigned.signed_by(SigningKey(key_files.read(key)))
    write_whole(draft, signed.to_bytes())
    click.echo(f"{draft}: {len(signed.signatures)} signatures")


def print_revision(draft: Draft) -> None:
    for line in authority_drafts.describe(draft.revision):
        click.echo(line)
