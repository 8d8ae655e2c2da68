"""What the command line's verbs do."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import torch
import trio
from rich.console import Console

from grailnode import bucket_setup, founding, genesis, joining, keys, proofs, provisions, public_beacon, workspace
from grailnode.buckets import Bucket, BucketError, Document, Provider, Use, parse_bucket
from grailnode.config import Config, ConfigError, load, without_file
from grailnode.conversion import Conversion, Format, convert
from grailnode.demo.run import DemoSettings
from grailnode.demo.run import run_demo as run_demo_network
from grailnode.files import NewFiles
from grailnode.founding import Choices
from grailnode.inspect import inspect_patch, patch_table
from grailnode.node_process import Kind, Launch, data_file, main, make_canary, make_node, make_spectator, replay_group
from grailnode.observe import RECENT_WINDOWS, Observer, newest_summarized
from grailnode.processes import ProcessSpec, Supervisor, run_until_interrupted
from grailnode.replay import Replayed, Which, replay_table, verify_ledger
from grailnode.telemetry import Telemetry
from grailnode.verification import verify_chain
from grailnode.view import render_status, render_summary
from protocol import limits, paths, safetensors
from protocol.authority import OPEN, Admission
from protocol.errors import AdmissionError, ProtocolError, SignatureError, found_in
from protocol.signing import check_public_key
from roles.authority import refresh_authority
from roles.node import Node
from roles.ports import NotFoundError, StoreError, TooLargeError

DEFAULT_WINDOWS = 72
_SHOWN_LINES = 8
_PUBLIC_WINDOW_SECONDS = 60.0

_PROCESSES: dict[str, tuple[Kind, ...]] = {
    "trainer": ("training", "upload", "download"),
    "miner": ("miner",),
    "validator": ("validator",),
}


def open_config(run: str, overrides: tuple[str, ...] = (), *, trust: bool = False) -> Config:
    """The configuration of a run.toml, or of a run manifest's URL; the manifest is a file in it.

    Raises:
        ConfigError, StoreError, ProtocolError: it cannot be used; the manifest is not to be had.
    """
    if joining.is_url(run):
        base, run_id = joining.named_run(run)
        values: dict[str, Any] = {"run": {"manifest": run, "id": run_id}, "beacon": {"key": ""}}
        if base:
            place = {"kind": "https", "url": base}
            values["store"] = {**place, "meeting": place}
        config = without_file(values, overrides, Path.cwd())
    else:
        config = load(Path(run), overrides)
    config, told = joining.localize(config, trust=trust)
    if told:
        _tell(told)
    return config


_aws_region = re.compile(r"\.s3\.([a-z0-9-]+)\.amazonaws\.com")


def run_role(role: str, run: str, name: str | None, overrides: tuple[str, ...], *, trust: bool) -> None:
    """Run a node until Ctrl-C."""
    config = open_config(run, overrides, trust=trust)
    name = name or ("miner-1" if role == "miner" else role)
    kinds = _PROCESSES[role]
    if role == "trainer" and config.beacon.key:
        kinds = ("beacon", *kinds)
    if role == "trainer" and config.trainer.canaries:
        kinds = (*kinds, "canary")
    assert set(kinds) <= set(get_args(Kind))
    check_start(config, role, name)
    specs = [ProcessSpec(f"{name}/{kind}", main, (Launch(config, kind, name),)) for kind in kinds]
    supervisor = Supervisor(_tell)
    run_until_interrupted(partial(supervisor.keep, specs))
    _tell(f"{name}: stopped")


def _tell(line: str) -> None:
    """A line on standard error; a closed terminal or a full disk behind it must not stop a node."""
    with suppress(OSError, ValueError):
        click.echo(line, err=True)


_node_name = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,32}")


def _check_name(name: str) -> None:
    """Refuse what cannot be a node's name."""
    if not _node_name.fullmatch(name):
        raise click.UsageError(
            f"--name {name}: up to 32 letters, digits, '_', '.' and '-', the first no '.', "
            "which announcements and file names carry"
        )


def check_start(config: Config, role: str, name: str) -> None:
    """Refuse what cannot work before any process starts."""
    if config.store.kind == "https":
        raise ConfigError(
            f'store.kind: a {role} writes, and "https" only reads; `grailnode init DIR --bucket NAME` shows how to set a '
            "bucket up"
        )
    _check_name(name)
    path = config.at(config.node.keys) / f"{name}{keys.SUFFIX}"
    if not path.exists():
        if role != "miner":
            raise keys.KeyFileError(
                f"{path}: no such key; use --name for the node whose key is here, or restore its key"
            )
        _tell(f"{path}: made, a new key: {keys.read_or_create(path).public.hex()}")
    _check_device(config.engine.device)
    node = make_node(config, name, Telemetry(name))
    trio.run(refresh_authority, node)
    allowed = {"trainer": node.authority.trainers, "validator": node.authority.validators}
    if role in allowed and node.key.public not in allowed[role]:
        raise keys.KeyFileError(f"{path}: not a {role} key of this run; use --name for the node whose key is")
    if role == "trainer" and config.trainer.canaries:
        _check_canary(make_canary(config, name, Telemetry(name)))
    if role == "trainer":
        provisions.needed(node.run.environment)
        provisions.published(node.run, data_file(config))
    if role != "trainer" or config.trainer.canaries:
        provisions.open_sandbox(node.run)


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # a wrong name; a torch without it
        raise ConfigError(f"engine.device: torch cannot use {name!r} here ({str(error).splitlines()[0]})") from None


def _check_canary(node: Node) -> None:
    """Refuse to start with a canary that nobody takes notice of."""
    trio.run(refresh_authority, node)
    try:
        trio.run(proofs.check_admitted, node)
    except (AdmissionError, keys.KeyFileError) as error:
        public = node.key.public.hex()
        raise ConfigError(
            f"trainer.canaries: this run admits by {node.authority.admission.policy}, and its canary {public} is not "
            f"admitted ({error}); run `grailnode admit {public}`, or set trainer.canaries = 0"
        ) from None


def run_demo(windows: int | None, seed: int, out: Path, keep: bool, command: str) -> None:
    """The demo, and its summary."""
    if (out / "network").exists():
        raise workspace.WorkspaceError(f"{out / 'network'}: a run was kept there; choose another --out, or remove it")
    settings = DemoSettings(windows or DEFAULT_WINDOWS, seed, out, keep, command)
    report = run_until_interrupted(partial(run_demo_network, settings, Choices(), workspace.Pace()))
    if report is None:
        raise click.exceptions.Abort
    console = Console()
    console.print(render_summary(report))
    console.print(f"report: {out / 'report.html'}  {out / 'report.json'}")


@dataclass(frozen=True)
class Judges:
    """A run's validators: how many keys are made here, the public keys of those that others hold, and how many must accept."""

    made: int = 1
    elsewhere: tuple[bytes, ...] = ()
    quorum: int = 1

    @classmethod
    def parse(cls, made: int, elsewhere: Sequence[str], quorum: int) -> "Judges":
        """From the command line.

        Raises:
            WorkspaceError: a key is none, is named twice, or nobody is left to judge.
        """
        found: list[bytes] = []
        for text in elsewhere:
            try:
                key = bytes.fromhex(text)
                check_public_key(key)
            except (ValueError, SignatureError):
                raise workspace.WorkspaceError(
                    f"--validator {text}: not a public key (64 hexadecimal digits)"
                ) from None
            if key in found:
                raise workspace.WorkspaceError(f"--validator {text}: named twice")
            found.append(key)
        if not made and not found:
            raise workspace.WorkspaceError("a run without validators; name one with --validator, or raise --validators")
        return cls(made, tuple(found), quorum)


def init_run(
    directory: Path,
    policy: Path | None,
    proof: Path | None,
    environment: str,
    data: Path | None,
    max_tokens: int | None,
    founders: tuple[int, int] = (1, 1),
    admission: Admission = OPEN,
    judges: Judges | None = None,
    window: float | None = None,
    beacon: str | None = None,
) -> workspace.Workspace:
    """A new run on this machine.

    Args:
        founders: root keys, and how many of them must sign.
        window: how long one is, in seconds; None for the demo's, or a minute with a public beacon.
        beacon: the name of a public one; None for one of the run's own.
    """
    judges = judges or Judges()
    tokens = max_tokens or provisions.needed(environment).tokens
    roots, threshold = founders
    if threshold > roots:
        raise workspace.WorkspaceError(f"{threshold} of {roots} root keys can never sign; lower --threshold")
    if judges.quorum > judges.made + len(judges.elsewhere):
        raise workspace.WorkspaceError(
            f"{judges.quorum} of {judges.made + len(judges.elsewhere)} validators can never accept; lower --quorum, or name "
            "more with --validator"
        )
    choices = Choices(
        environment=environment,
        data=data,
        max_tokens=tokens,
        roots=roots,
        root_threshold=threshold,
        validators=judges.made,
        quorum=judges.quorum,
        admission=admission,
    )
    chain = public_beacon.CHAINS[beacon] if beacon else None
    if chain is not None:
        try:
            choices = choices.in_rounds(public_beacon.rounds_of(chain, window or _PUBLIC_WINDOW_SECONDS))
        except ValueError as error:
            raise workspace.WorkspaceError(f"{error}; raise --window") from None
    pace = workspace.Pace() if window is None else workspace.Pace(period_ms=round(window * 1000 / choices.rounds))
    made = workspace.create(
        directory,
        choices,
        pace,
        policy=policy or genesis.PACKAGED,
        proof=proof,
        judges=judges.elsewhere,
        beacon=chain,
    )
    click.echo(f"run {made.run_id.hex()[:16]} in {made.config}")
    if made.problems is not None:
        lines = ", ".join(map(str, made.problems.kept_lines[:_SHOWN_LINES]))
        more = ", ..." if made.problems.held_out_size > _SHOWN_LINES else ""
        click.echo(
            f"problems: {len(made.problems.training)} to train on, {made.problems.held_out_size} held out "
            f"(of lines {lines}{more}); completions of up to {tokens} tokens"
        )
    if roots > 1:
        click.echo(f"{threshold} of {roots} root keys decide who may act: move keys/root-*.key to where no network is")
    click.echo("start its nodes, each in a terminal of its own:")
    for start in made.starts:
        click.echo(f"  {start}")
    for key in judges.elsewhere:
        click.echo(f"validator {key.hex()} is somebody else's: it joins")
    return made


@dataclass(frozen=True)
class BucketOptions:
    """A bucket as the command line names it (grailnode/buckets.py)."""

    text: str
    provider: Provider
    region: str
    url: str
    readers: tuple[str, ...]
    days: int

    def parse(self) -> Bucket:
        """The bucket.

        Raises:
            BucketError: it cannot be one.
        """
        return parse_bucket(self.text, self.provider, self.region, self.url)


def init_bucket(make: Callable[[], workspace.Workspace], options: BucketOptions) -> None:
    """A new run that lives in a bucket, its meeting point too; print what the bucket needs."""
    bucket = options.parse()
    made = make()
    rules = founding.open_run((made.directory / "run.manifest").read_bytes()).record
    owners = tuple(key for name, key in made.keys.items() if not name.startswith("root"))
    use = Use(owners, options.readers, rules.beacon.chain_hash.hex(), options.days)
    with made.files as files:
        bucket_setup.move_store(files, made.config, bucket)
        written = bucket_setup.write_documents(files, made.directory, bucket, use)
    _print_documents(made.directory, written)
    click.echo(f"\nothers join by {bucket.url}/{paths.run(made.run_id)}")


def join_run(directory: Path, options: BucketOptions, manifest: str, meeting: str, name: str) -> None:
    """A directory for a node of somebody else's run; print what its bucket needs."""
    _check_name(name)
    bucket = options.parse()
    provider: Provider = "aws" if "://" not in meeting or meeting.startswith("s3://") else options.provider
    base = joining.named_run(manifest)[0]
    if not base:
        raise BucketError(f"{manifest}: which run? a manifest's URL ends with /runs/ID, ID being 64 hexadecimal digits")
    there = _aws_region.search(base)  # the founder's bucket may be in another region than this node's
    met = replace(parse_bucket(meeting, provider, there[1] if there else options.region, base), url=base)
    with NewFiles() as files:
        key = bucket_setup.join(files, directory, bucket, bucket_setup.Membership(manifest, name, met))
        use = Use((key,), options.readers, days=options.days)
        written = bucket_setup.write_documents(files, directory, bucket, use)
    click.echo(f"{name} is {key.hex()}")
    _print_documents(directory, written)


def _print_documents(directory: Path, written: Sequence[Document]) -> None:
    for document in written:
        click.echo(f"\n# {directory / bucket_setup.DOCUMENTS / document.name}\n{document.text}# {document.command}")


def print_status(config: Config) -> None:
    """What the store shows of a run."""

    async def show() -> None:
        node = make_spectator(config)
        newest = None
        with suppress(NotFoundError, TooLargeError):  # where storage does not answer at all there is nothing to show
            await node.store.get(
                paths.head(node.authority.trainers[0]), limits.MAX_HEAD_BYTES + limits.MAX_ENVELOPE_BYTES
            )
        with suppress(StoreError, ProtocolError):  # the observer shows what can be had, and says what is wrong
            await refresh_authority(node)
            newest = await newest_summarized(node)
        observer = Observer(node, max(0, (newest or node.window()) - RECENT_WINDOWS), last_window=newest)
        await observer.refresh()
        Console().print(render_status(observer.state()))

    trio.run(show)


def verify_run(config: Config) -> None:
    """Check a run's chain."""

    async def check() -> None:
        node = make_spectator(config)
        await refresh_authority(node)
        held = await verify_chain(node, click.echo)
        click.echo(f"version {held.version} holds: weights {held.digest.hex()}")

    trio.run(check)
    sys.stdout.flush()


def verify_ledgers(config: Config) -> None:
    """Check what every validator of a run has written."""

    async def check() -> None:
        node = make_spectator(config)
        await refresh_authority(node)
        for validator in node.authority.validators:
            if not await verify_ledger(node, validator, click.echo):
                click.echo(f"validator {validator.hex()[:16]}: no summaries")

    trio.run(check)


def verify_rollout(config: Config, which: str) -> None:
    """Judge one group again; exit 1 where a validator said otherwise."""
    try:
        wanted = Which.parse(which)
    except ValueError as error:
        raise click.UsageError(str(error)) from None

    async def judge() -> Replayed:
        return await replay_group(config, wanted)

    found = trio.run(judge)
    Console().print(replay_table(wanted, found))
    verdict = found.judgement.reason or "accepted"
    if any(said not in (verdict, "no verdict", "not audited") for _, said in found.said):
        raise click.ClickException("a validator came to another judgement")


def inspect_file(file: Path, base: Path | None, *, as_json: bool, everything: bool) -> None:
    """What a patch holds."""
    with found_in(base):
        weights = safetensors.read(base.read_bytes()) if base else None
    with found_in(file):
        inspected = inspect_patch(file.read_bytes(), weights)
    if as_json:
        click.echo(json.dumps(inspected.to_json(), indent=2))
    else:
        Console().print(patch_table(inspected, unchanged=everything))


def convert_file(
    source: Path, out: Path, given: Format, wanted: Format, base: Path | None, *, versions: tuple[int, int]
) -> None:
    """One weight update in another format."""
    for written in convert(Conversion(source, given, wanted, out, base, *versions)):
        click.echo(f"{written}: {written.stat().st_size} bytes")
