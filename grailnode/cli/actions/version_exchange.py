"""What `grailnode publish` and `grailnode follow` do."""

from pathlib import Path

import click

from grailnode import library
from grailnode.cli.options import check_name, report_line
from grailnode.run.files import write_whole
from protocol.chain import safetensors


def publish(directory: Path, run: Path, name: str, step: int) -> None:
    """Run `grailnode publish`."""
    check_name(name)
    with library.open_trainer(run, name, report=report_line) as trainer:
        version = trainer.publish(directory, step=step)
        trainer.wait_for_uploads()
    click.echo(f"{directory}: version {version} is in storage")


def follow(run: str, directory: Path, keep: int, once: bool) -> None:
    """Run `grailnode follow`."""
    directory.mkdir(parents=True, exist_ok=True)
    for version in library.follow(run, report=report_line):
        file = directory / f"{version.number:010d}.safetensors"
        write_whole(file, safetensors.write(version.weights))
        click.echo(f"{file}: version {version.number}, step {version.step}, weights {version.digest.hex()}")
        for old in sorted(directory.glob("*.safetensors"))[:-keep]:
            old.unlink()
        if once:
            return
