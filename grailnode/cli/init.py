"""What `grailnode init` does."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from grailnode.beacon import public_chains
from grailnode.cli.node import check_name
from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.run import bucket_setup, creation, joining, requirements, workspace
from grailnode.run.buckets import Bucket, BucketError, BucketUse, Document, Provider, parse_bucket
from grailnode.run.creation import Choices
from grailnode.run.files import NewFiles
from protocol import paths
from protocol.errors import SignatureError
from protocol.identity.authority import OPEN, Admission
from protocol.identity.signing import check_public_key

_SHOWN_LINES = 8
_PUBLIC_WINDOW_SECONDS = 60.0
_aws_region = re.compile(r"\.s3\.([a-z0-9-]+)\.amazonaws\.com")


@dataclass(frozen=True)
class ValidatorSet:
    """A run's validators: how many keys are made here, the public keys of those that others hold, and how many must
    accept.
    """

    made: int = 1
    elsewhere: tuple[bytes, ...] = ()
    quorum: int = 1

    @classmethod
    def parse(cls, made: int, elsewhere: Sequence[str], quorum: int) -> "ValidatorSet":
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
    judges: ValidatorSet | None = None,
    window: float | None = None,
    beacon: str | None = None,
) -> workspace.Workspace:
    """A new run on this machine.

    Args:
        founders: root keys, and how many of them must sign.
        window: how long one is, in seconds; None for the demo's, or a minute with a public beacon.
        beacon: the name of a public one; None for one of the run's own.
    """
    judges = judges or ValidatorSet()
    tokens = max_tokens or requirements.needed(environment).tokens
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
    chain = public_chains.CHAINS[beacon] if beacon else None
    if chain is not None:
        try:
            choices = choices.in_rounds(public_chains.rounds_of(chain, window or _PUBLIC_WINDOW_SECONDS))
        except ValueError as error:
            raise workspace.WorkspaceError(f"{error}; raise --window") from None
    pace = workspace.Pace() if window is None else workspace.Pace(period_ms=round(window * 1000 / choices.rounds))
    made = workspace.create(
        directory,
        choices,
        pace,
        policy=policy or PACKAGED_POLICY,
        proof=proof,
        judges=judges.elsewhere,
        beacon=chain,
    )
    click.echo(f"run {made.run_id.hex()[:16]} in {made.config}")
    if made.problems is not None:
        lines = ", ".join(map(str, made.problems.held_out_lines[:_SHOWN_LINES]))
        more = ", ..." if made.problems.held_out_size > _SHOWN_LINES else ""
        click.echo(
            f"problems: {len(made.problems.training_problems)} to train on, {made.problems.held_out_size} held out "
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
    """A bucket as the command line names it (grailnode/run/buckets.py)."""

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
    rules = creation.open_run((made.directory / "run.manifest").read_bytes()).record
    owners = tuple(key for name, key in made.keys.items() if not name.startswith("root"))
    use = BucketUse(owners, options.readers, rules.beacon.chain_hash.hex(), options.days)
    with made.files as files:
        bucket_setup.move_store(files, made.config, bucket)
        written = bucket_setup.write_documents(files, made.directory, bucket, use)
    _print_documents(made.directory, written)
    click.echo(f"\nothers join by {bucket.url}/{paths.run(made.run_id)}")


def join_run(directory: Path, options: BucketOptions, manifest: str, meeting: str, name: str) -> None:
    """A directory for a node of somebody else's run; print what its bucket needs."""
    check_name(name)
    bucket = options.parse()
    provider: Provider = "aws" if "://" not in meeting or meeting.startswith("s3://") else options.provider
    base = joining.named_run(manifest)[0]
    if not base:
        raise BucketError(f"{manifest}: which run? a manifest's URL ends with /runs/ID, ID being 64 hexadecimal digits")
    there = _aws_region.search(base)  # the founder's bucket may be in another region than this node's
    met = replace(parse_bucket(meeting, provider, there[1] if there else options.region, base), url=base)
    with NewFiles() as files:
        key = bucket_setup.join(files, directory, bucket, bucket_setup.Membership(manifest, name, met))
        use = BucketUse((key,), options.readers, days=options.days)
        written = bucket_setup.write_documents(files, directory, bucket, use)
    click.echo(f"{name} is {key.hex()}")
    _print_documents(directory, written)


def _print_documents(directory: Path, written: Sequence[Document]) -> None:
    for document in written:
        click.echo(f"\n# {directory / bucket_setup.DOCUMENTS / document.name}\n{document.text}# {document.command}")
