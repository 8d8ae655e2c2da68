"""What `grailnode publish` and `grailnode follow` do."""

import re
from pathlib import Path
from typing import Final

import click

from grailnode import library
from grailnode.cli.options import check_name, report_line
from grailnode.run.files import write_whole
from protocol.chain import safetensors

_own_name: Final = re.compile(r"\d{10}\.safetensors")


def publish(directory: Path, run: Path, name: str, step: int) -> None:
    check_name(name)
    with library.open_trainer(run, name, report=report_line) as trainer:
        version = trainer.publish(directory, step=step)
        trainer.wait_for_uploads()
    click.echo(f"{directory}: version {version} is in storage")


def follow(run: str, directory: Path, keep: int, once: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for version in library.follow(run, report=report_line):
        file = directory / f"{version.number:010d}.safetensors"
        write_whole(file, safetensors.write(version.weights))
        click.echo(f"{file}: version {version.number}, step {version.step}, weights {version.digest.hex()}")
        # After a rewind a newer version has a lower number, so the time of writing decides.
        own = [path for path in directory.iterdir() if _own_name.fullmatch(path.name) and path != file]
        for old in sorted(own, key=lambda path: path.stat().st_mtime_ns, reverse=True)[keep - 1 :]:
            old.unlink()
        if once:
            return
