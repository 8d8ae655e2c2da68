"""What `grailnode init` does: create a run on this machine or in a bucket, or prepare a node of somebody else's run."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from grailnode.beacon import public_chains
from grailnode.config import EngineSection
from grailnode.engine.compute import config_arithmetics
from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.run import creation, joining, key_files, requirements, run_toml, workspace
from grailnode.run.buckets import Bucket, BucketError, BucketUse, Document, Provider, documents, parse_bucket
from grailnode.run.creation import Choices
from grailnode.run.files import NewFiles
from grailnode.run.recipe import RulesSection, read_recipe, with_options
from grailnode.run.workspace import MINERS, Pace, Workspace, WorkspaceError
from protocol import paths
from protocol.beacon import ChainInfo
from protocol.errors import SignatureError
from protocol.identity.authority import OPEN, Admission
from protocol.identity.signing import SigningKey, check_public_key
from protocol.proof import Arithmetic
from protocol.quantization import Precision
from protocol.run import Numerics

BUCKET_DIRECTORY: Final = "bucket"
"""The directory beside run.toml with the documents that a bucket needs."""

COMMANDS_FILE: Final = "commands.sh"
"""The file in that directory with the commands that apply the documents."""

_MAX_TITLE: Final = 64
_COMMANDS_HEADER: Final = """\
# What the bucket needs. Read each document, replace the words in capitals, and run the commands in this directory.
# Those that create a user or a token print credentials, which nodes read from s3.credentials (mode 0600).
"""
_PUBLIC_WINDOW_SECONDS: Final = 60.0
_aws_region: Final = re.compile(r"\.s3\.([a-z0-9-]+)\.amazonaws\.com")


@dataclass(frozen=True)
class InitOptions:
    """The options of `grailnode init`, under the names of its parameters.

    Attributes:
        title: of the run; None for the directory's name.
        policy: a checkpoint directory; None for the packaged genesis.
        recipe: a file of constants (grailnode/run/recipe.py); the rules among the options replace its own.
        max_tokens: the longest completion; None for the recipe's, or else the environment's.
        numerics: "exact" if all miners and validators compute the same bits.
        miner_arithmetics, validator_arithmetics: how miners and validators may compute; none for how the recipe's
            engine does.
        proof: as for `workspace.create`.
        bucket: where this run or node writes; None for a directory of this machine.
        url: where everybody reads the bucket; empty for the service's own URL.
        readers: principals that may read the bucket; everybody where there are none.
        days: after which objects of settled windows are deleted from the bucket.
        join: the URL of the manifest of the run to join; None to create one.
        meeting: the bucket where the participants of the run to join meet.
        name: of the node that joins.
        threshold: root keys that must sign; None for 2, or for the only one.
        trainers: how many sites train; 1 for the trainer alone.
        validators: how many keys of validators are created; validator_keys: public keys of others, in hexadecimal.
        spares: to how many validators beyond the quorum a group is dealt.
        window: seconds; None for the demo's, or a minute with a public beacon.
        work: bits of the proof of work that each key of an open run's miners does a day; 0 for none.
    """

    directory: Path
    title: str | None
    policy: Path | None
    recipe: Path | None
    environment: str | None
    chat: bool | None
    system_prompt: str | None
    data: Path | None
    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    evaluation_problems: int | None
    evaluation_samples: int | None
    pass_at: int | None
    group_size: int | None
    groups: int | None
    deposit: float | None
    lora_rank: int | None
    lora_alpha: float | None
    lora_targets: str | None
    precision: Precision | None
    numerics: Numerics
    miner_arithmetics: tuple[Arithmetic, ...]
    validator_arithmetics: tuple[Arithmetic, ...]
    proof: Path | None
    bucket: str | None
    provider: Provider
    region: str
    url: str
    readers: tuple[str, ...]
    days: int
    join: str | None
    meeting: str | None
    name: str
    roots: int
    threshold: int | None
    trainers: int
    validators: int
    validator_keys: tuple[str, ...]
    quorum: int
    spares: int
    window: float | None
    beacon: Literal["own", "quicknet"]
    admission: Literal["open", "allowlist", "invite"]
    work: int


@dataclass(frozen=True)
class NewRun:
    """A run that was created: its choices, and for one in a bucket what that needs and the manifest's public URL."""

    workspace: Workspace
    choices: Choices
    documents: tuple[Document, ...] = ()
    url: str = ""


@dataclass(frozen=True)
class NewMember:
    """A node that can join a run: its public key, and what its bucket needs."""

    key: bytes
    documents: tuple[Document, ...]


def create_run(options: InitOptions) -> NewRun:
    """Create a run, in a bucket where one is named.

    Raises:
        WorkspaceError, BucketError: the options contradict each other or cannot be used.
        ConfigError: the recipe cannot be used.
        ProofFileError, PolicyError, RequirementError, ChatTemplateError, KeyFileError, OSError: as for
            `workspace.create`.
    """
    bucket = None if options.bucket is None else _bucket(options, options.bucket)
    chain = None if options.beacon == "own" else public_chains.CHAINS[options.beacon]
    recipe = read_recipe(options.recipe)
    if recipe.trainer.outer is not None and options.trainers == 1:
        raise WorkspaceError(f"{options.recipe}: [trainer.outer] is for several sites; say how many with --trainers")
    choices = _choices(options, with_options(recipe.rules, vars(options)), chain, recipe.engine)
    seconds = options.window
    new_workspace = workspace.create(
        options.directory,
        choices,
        Pace() if seconds is None else Pace(period_ms=round(seconds * 1000 / choices.rounds)),
        policy=options.policy or PACKAGED_POLICY,
        proof=options.proof,
        miners=MINERS if options.admission == "open" else (),  # others would have to be admitted before they start
        beacon=chain,
        bucket=bucket,
        sections=recipe.sections(),
    )
    if bucket is None:
        return NewRun(new_workspace, choices)
    writers = tuple(key for name, key in new_workspace.keys.items() if not name.startswith("root"))
    manifest = creation.open_run((new_workspace.directory / "run.manifest").read_bytes()).record
    use = BucketUse(writers, options.readers, manifest.beacon.chain_hash.hex(), options.days)
    with new_workspace.files as files:
        texts = _write_documents(files, options.directory, bucket, use)
    return NewRun(new_workspace, choices, texts, f"{bucket.url}/{paths.run(new_workspace.run_id)}")


def join_run(options: InitOptions, manifest: str, meeting: str) -> NewMember:
    """Prepare a directory for a node of somebody else's run: run.toml, and the node's key unless it is there already.

    Args:
        manifest: the URL of the run's manifest.
        meeting: the bucket where the run's participants meet.

    Raises:
        ConfigError, BucketError: a URL or a bucket cannot be used, or there is a run already.
        KeyFileError, OSError: a file can be neither read nor written.
    """
    own = _bucket(options, options.bucket or "")
    meeting_bucket, run_id = _meeting_bucket(options, manifest, meeting)
    config = options.directory / "run.toml"
    if config.exists():
        raise BucketError(f"{config}: there is a run already; choose another directory")
    with NewFiles() as files:
        path = options.directory / "keys" / f"{options.name}{key_files.SUFFIX}"
        key = SigningKey(key_files.read(path) if path.exists() else files.create_key(path)).public
        files.write(config, run_toml.for_member(manifest, run_id, own, meeting_bucket).encode())
        use = BucketUse((key,), options.readers, days=options.days)
        texts = _write_documents(files, options.directory, own, use)
    return NewMember(key, texts)


def _bucket(options: InitOptions, text: str) -> Bucket:
    return parse_bucket(text, options.provider, options.region, options.url)


def _meeting_bucket(options: InitOptions, manifest: str, meeting: str) -> tuple[Bucket, str]:
    """Return the bucket where the participants of a run meet, and the run's id."""
    base, run_id = joining.split_manifest_url(manifest)
    if not base:
        raise BucketError(f"{manifest}: which run? a manifest's URL ends with /runs/ID, ID being 64 hexadecimal digits")
    joining.check_base(base, f"--join {manifest}")
    provider: Provider = "aws" if "://" not in meeting or meeting.startswith("s3://") else options.provider
    region = _aws_region.search(base)  # the meeting point may be in another region than this node's bucket
    return replace(parse_bucket(meeting, provider, region[1] if region else options.region, base), url=base), run_id


def _write_documents(files: NewFiles, directory: Path, bucket: Bucket, use: BucketUse) -> tuple[Document, ...]:
    texts = documents(bucket, use)
    for document in texts:
        files.write(directory / BUCKET_DIRECTORY / document.name, document.text.encode())
    commands = "".join(f"\n# {document.name}\n{document.command}\n" for document in texts)
    files.write(directory / BUCKET_DIRECTORY / COMMANDS_FILE, f"{_COMMANDS_HEADER}{commands}".encode())
    return tuple(texts)


def _choices(options: InitOptions, rules: RulesSection, chain: ChainInfo | None, engine: EngineSection) -> Choices:
    """Return the choices of a run from the options.

    Args:
        rules: those of the recipe, with what the options say instead.
        chain: the public beacon; None for one of the run's own.
        engine: of the recipe, which decides how nodes compute unless the options do.

    Raises:
        WorkspaceError: the options contradict each other.
        RequirementError: the environment is unknown.
    """
    remote_validators = _validator_keys(options.validator_keys)
    validators = options.validators + len(remote_validators)
    if not validators:
        raise WorkspaceError("a run without validators; name one with --validator, or raise --validators")
    threshold = min(2, options.roots) if options.threshold is None else options.threshold
    if threshold > options.roots:
        raise WorkspaceError(f"{threshold} of {options.roots} root keys can never sign; lower --threshold")
    if options.quorum > validators:
        raise WorkspaceError(
            f"{options.quorum} of {validators} validators can never accept; lower --quorum, or name more with "
            "--validator"
        )
    if options.numerics == "exact" and (options.miner_arithmetics or options.validator_arithmetics):
        raise WorkspaceError(
            "--numerics exact: all nodes compute in exact arithmetic; drop --miner-arithmetic, --validator-arithmetic"
        )
    generating, checking = config_arithmetics(engine.kind, engine.dtype, engine.states)
    choices = Choices(
        name=_title(options),
        environment=rules.environment,
        data=options.data,
        chat=rules.chat,
        system_prompt=rules.system_prompt,
        max_tokens=rules.max_tokens or requirements.find(rules.environment).tokens,
        temperature=rules.temperature,
        top_k=rules.top_k,
        top_p=rules.top_p,
        min_p=rules.min_p,
        evaluation_problems=rules.evaluation_problems,
        evaluation_samples=rules.evaluation_samples,
        pass_at=rules.pass_at,
        group_size=rules.group_size,
        groups=rules.groups,
        deposit=rules.deposit,
        lora_rank=rules.lora_rank,
        lora_alpha=rules.lora_alpha,
        lora_targets=rules.lora_targets,
        precision=rules.precision,
        roots=options.roots,
        root_threshold=threshold,
        sites=options.trainers if options.trainers > 1 else 0,
        validators=options.validators,
        remote_validators=remote_validators,
        quorum=options.quorum,
        spares=options.spares,
        admission=_admission(options),
        numerics=options.numerics,
        miner_arithmetics=options.miner_arithmetics or (generating,),
        validator_arithmetics=options.validator_arithmetics or (checking,),
    )
    if chain is None:
        return choices
    try:
        return choices.in_rounds(public_chains.rounds_of(chain, options.window or _PUBLIC_WINDOW_SECONDS))
    except ValueError as error:
        raise WorkspaceError(f"{error}; raise --window") from None


def _title(options: InitOptions) -> str:
    """Return the run's title; the directory's name without what a manifest cannot have in it."""
    if options.title is None:
        name = options.directory.resolve().name
        return "".join(character for character in name if character.isprintable())[:_MAX_TITLE] or "run"
    if not options.title or len(options.title) > _MAX_TITLE or not options.title.isprintable():
        raise WorkspaceError(f"--title {options.title!r}: give 1 to {_MAX_TITLE} printable characters")
    return options.title


def _admission(options: InitOptions) -> Admission:
    work = options.work if options.admission == "open" else 0
    credential = "work" if work else ""
    return OPEN.model_copy(update={"policy": options.admission, "credential": credential, "difficulty": work})


def _validator_keys(texts: tuple[str, ...]) -> tuple[bytes, ...]:
    """Return the public keys of validators whose secret keys other people hold.

    Raises:
        WorkspaceError: a text is no public key, or is given twice.
    """
    keys: list[bytes] = []
    for text in texts:
        try:
            key = bytes.fromhex(text)
            check_public_key(key)
        except (ValueError, SignatureError):
            raise WorkspaceError(f"--validator {text}: not a public key (64 hexadecimal digits)") from None
        if key in keys:
            raise WorkspaceError(f"--validator {text}: named twice")
        keys.append(key)
    return tuple(keys)
