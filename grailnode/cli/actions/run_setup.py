"""`grailnode init`: make a run on this machine or in a bucket, or a directory for a node of somebody else's run."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from grailnode import UserError
from grailnode.cli.from_model import given
from grailnode.cli.options import check_name
from grailnode.config import validate
from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.run import creation, key_files, run_option, run_toml, workspace
from grailnode.run.buckets import Bucket, BucketUse, documents, parse_bucket
from grailnode.run.files import NewFiles
from grailnode.run.requirements import completion_tokens
from grailnode.run.rules import Place, Rules
from grailnode.run.run_toml import Recipe, read_recipe
from grailnode.run.workspace import MINERS, Workspace
from protocol import paths
from protocol.identity.signing import SigningKey

_COMMANDS: Final = Path("bucket") / "commands.sh"
"""The file with the commands that apply the documents that a bucket needs, which lie beside it."""

_COMMANDS_HEADER: Final = """\
# What the bucket needs. Read each document, replace the words in capitals, and run the commands in this directory.
# Those that create a user or a token print credentials, which nodes read from s3.credentials (mode 0600).
"""
_aws_region: Final = re.compile(r"\.s3\.([a-z0-9-]+)\.amazonaws\.com")
_LISTED_LINES: Final = 8


def init(directory: Path, policy: Path | None, recipe: Path | None, proof: Path | None, **parameters: Any) -> None:
    place_options = given(Place, parameters)
    place = validate(Place, place_options, "init")
    if place.bucket is None and place_options:
        useless = ", ".join(f"--{'reader' if name == 'readers' else name}" for name in place_options)
        raise click.UsageError(f"{useless}: also give --bucket, where this run or node writes to")
    if (place.join is None) != (place.meeting is None):
        raise click.UsageError("--join and --meeting go together")
    if place.join is None or place.meeting is None:
        _create_run(directory, read_recipe(recipe, given(Rules, parameters)), place, policy or PACKAGED_POLICY, proof)
    else:
        check_name(place.name)
        _join_run(directory, place, place.join, place.meeting)


def _create_run(directory: Path, recipe: Recipe, place: Place, policy: Path, proof: Path | None) -> None:
    """Create a run, in a bucket if one is named, and print what its founder should know."""
    bucket = None if place.bucket is None else _own_bucket(place.bucket, place)
    if recipe.trainer.outer is not None and not recipe.rules.sites:
        raise UserError("[trainer.outer] of the recipe is for several sites; say how many with --trainers")
    miners = MINERS if recipe.rules.admission == "open" else ()  # others would have to be admitted before they start
    run = workspace.create(directory, recipe, policy=policy, proof=proof, miners=miners, bucket=bucket)
    if bucket is None:
        _print_run(run)
        _print_starts(run)
        return
    writers = tuple(key for name, key in run.keys.items() if not name.startswith("root"))
    manifest = creation.open_run((directory / "run.manifest").read_bytes()).record
    with run.files as files:
        use = BucketUse(writers, place.readers, manifest.beacon.chain_hash.hex(), place.days)
        count = _write_documents(files, directory, bucket, use)
    _print_run(run)
    _print_bucket(directory, count, ["s3.credentials"])
    _print_starts(run)
    click.echo(f"others join by {bucket.url}/{paths.run(run.run_id)}")


def _join_run(directory: Path, place: Place, manifest: str, meeting: str) -> None:
    """Prepare a directory for a node of somebody else's run: run.toml, and the node's key unless it is there already.
    Print the public key, and what the node's bucket needs.
    """
    own = _own_bucket(place.bucket or "", place)
    base, run_id = run_option.split_manifest_url(manifest)
    if not base:
        raise UserError(f"{manifest}: which run? a manifest's URL ends with /runs/ID, ID being 64 hexadecimal digits")
    run_option.check_base(base, f"--join {manifest}")
    region = _aws_region.search(base)  # the meeting point may be in another region than this node's bucket
    meeting_bucket = replace(parse_bucket(meeting, region[1] if region else place.region, base), url=base)
    config = directory / "run.toml"
    if config.exists():
        raise UserError(f"{config}: there is a run already; choose another directory")
    with NewFiles() as files:
        path = directory / "keys" / f"{place.name}{key_files.SUFFIX}"
        key = SigningKey(key_files.read(path) if path.exists() else files.create_key(path)).public
        files.write(config, run_toml.for_member(manifest, run_id, own, meeting_bucket).encode())
        count = _write_documents(files, directory, own, BucketUse((key,), place.readers, days=place.days))
    click.echo(f"{place.name} is {key.hex()}")
    _print_bucket(directory, count, ["s3.credentials", "meeting.credentials"])
    click.echo("then start it, ROLE being miner, validator or worker:")
    click.echo(f"  grailnode --role ROLE --run {shlex.quote(str(config))} --name {place.name}")


def _own_bucket(text: str, place: Place) -> Bucket:
    bucket = parse_bucket(text, place.region, place.url)
    if bucket.provider == "r2" and not place.url:
        raise UserError(f"{text}: R2 is read by a domain of its own; give --url https://pub-....r2.dev or your own")
    return bucket


def _write_documents(files: NewFiles, directory: Path, bucket: Bucket, use: BucketUse) -> int:
    """Write the documents that a bucket needs, and the commands that apply them; return how many documents."""
    texts = documents(bucket, use)
    for document in texts:
        files.write(directory / _COMMANDS.with_name(document.name), document.text.encode())
    commands = "".join(f"\n# {document.name}\n{document.command}\n" for document in texts)
    files.write(directory / _COMMANDS, f"{_COMMANDS_HEADER}{commands}".encode())
    return len(texts)


def _print_run(run: Workspace) -> None:
    rules = run.rules
    click.echo(f"run {run.run_id.hex()[:16]} in {run.config}")
    if (problems := run.problems) is not None:
        lines = ", ".join(map(str, problems.held_out_lines[:_LISTED_LINES]))
        more = ", ..." if problems.held_out_size > _LISTED_LINES else ""
        click.echo(
            f"problems: {len(problems.training_problems)} to train on, {problems.held_out_size} held out "
            f"(of lines {lines}{more}); completions of up to {completion_tokens(rules)} tokens"
        )
    if run.notice:
        click.echo(run.notice)
    if rules.roots > 1:
        click.echo(
            f"{rules.root_threshold} of {rules.roots} root keys decide who may act: move keys/root-*.key to where "
            "no network is"
        )
    if rules.admission != "open":
        click.echo("miners must be admitted first: `grailnode admit PUBLICKEY`")
    elif rules.work:
        hashes = f"{1 << rules.work:,} hashes"
        click.echo(f"anybody may mine: each key does a proof of work of about {hashes} a day (--work {rules.work})")
    for key in rules.validator_keys:
        click.echo(f"validator {key.lower()} is run by somebody else: it joins with `grailnode init --join`")


def _print_starts(run: Workspace) -> None:
    click.echo("start its nodes, each in a terminal of its own:")
    for command in run.start_commands:
        click.echo(f"  {command}")


def _print_bucket(directory: Path, count: int, credentials: Sequence[str]) -> None:
    """Print the commands that prepare a bucket: to apply its documents, and to store each file of credentials."""
    click.echo(
        f"first prepare the bucket, which needs {count} documents, and store the credentials that you get for it:"
    )
    click.echo(f"  less {shlex.quote(str(directory / _COMMANDS))}")
    for name in credentials:
        file = shlex.quote(str(directory / name))
        click.echo(f"  install -m 600 /dev/null {file} && editor {file}")
