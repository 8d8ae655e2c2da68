"""run.toml: which run a node takes part in, where its store, keys and state are, and what its operator decides.

The file is read once and passed on as values. Every key can be overridden on the command line
(`--set trainer.learning_rate=2e-5`). It holds no secrets: keys are in files that only their owner can read, and storage
credentials come from such a file or from the environment.
"""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grailnode import UserError
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.identity.participant import SPACE_FORM
from protocol.limits import MAX_STREAMS, MAX_WORKERS
from roles.trainer.learn.learning_rate import ScheduleName
from roles.trainer.learn.loss.loss_names import AdvantageName, LossName
from roles.trainer.publish.retention import check_retention

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
OuterMethod = Literal["pulseloco", "pulseloco-exact", "sparseloco", "diloco", "averaging"]

URL_RULE: Final = "a url is https://host[:port][/path], host in lower case, without user, query or a slash at the end"
"""What `is_space_url` accepts, in words."""


class ConfigError(UserError):
    """A configuration that cannot be used: names the file, the key and the fix."""


def is_space_url(text: str) -> bool:
    """Return whether objects may be read below a URL: see `URL_RULE`, and plain http on this machine."""
    return re.fullmatch(SPACE_FORM, text) is not None


class Section(BaseModel):
    """Keys and values of a TOML file, all of them known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Checked = TypeVar("Checked", bound=Section)


class RunSection(Section):
    """Which run: the signed manifest's file or URL, and the id that it must have (empty accepts any)."""

    manifest: str = "run.manifest"
    id: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""


class PlaceSection(Section):
    """Where objects are stored: a directory, an S3 bucket (or its part below `prefix`), or a base URL to read from.

    `url` is the base of kind "https"; for the other kinds it is where everybody else reads the same objects.
    """

    kind: Literal["local", "s3", "https"] = "local"
    path: Path = Path("store")
    url: str = ""
    bucket: str = ""
    endpoint: str = ""
    region: str = "us-east-1"
    addressing: Literal["auto", "path", "virtual"] = "auto"
    prefix: Annotated[str, Field(pattern=r"^([A-Za-z0-9_~-][A-Za-z0-9._~-]*/?)*$")] = ""
    credentials: Path | None = None
    concurrency: Annotated[int, Field(ge=1, le=256)] = 16
    requests_per_second: Positive = 100.0
    attempts: Count = 6
    connect_seconds: Positive = 10.0
    silence_seconds: Positive = 30.0
    deadline_seconds: Positive = 3600.0
    min_bytes_per_second: Positive = 16_384.0

    @model_validator(mode="after")
    def _check_place(self) -> "PlaceSection":
        if self.kind == "s3" and not self.bucket:
            raise ValueError('kind "s3" needs a bucket')
        if self.kind == "https" and not self.url:
            raise ValueError('kind "https" needs a url')
        if not is_space_url(self.url):  # an empty one is
            raise ValueError(URL_RULE)
        return self


PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoreSection(PlaceSection):
    """Where this node writes. Without `meeting` all nodes of the run share this store; with it each has its own.

    `peers` says where the objects of a key are, whatever it announces; `private_addresses` allows announced URLs that
    point into private networks or, by plain http, to this machine.
    """

    meeting: PlaceSection | None = None
    peers: dict[PublicKey, PlaceSection] = Field(default_factory=dict)
    private_addresses: bool = False

    @model_validator(mode="after")
    def _check_url(self) -> "StoreSection":
        if self.meeting is not None and not self.url:
            raise ValueError("where participants meet elsewhere, url says where they read what this node writes")
        return self


class NodeSection(Section):
    """Where this machine keeps keys (one file for each name), state (one directory for each name), logs and downloads.

    `cache` is shared by all nodes of the machine and never larger than `cache_bytes`; a local store needs none.
    `metrics_port` of 127.0.0.1 serves /metrics (the processes of a trainer take the next ports too); 0 turns it off.
    """

    keys: Path = Path("keys")
    state: Path = Path("state")
    logs: Path = Path("logs")
    cache: Path = Path("cache")
    cache_bytes: Count = 20 << 30
    metrics_port: Annotated[int, Field(ge=0, le=65_000)] = 0


class BeaconSection(Section):
    """Where public randomness comes from: the store for a run's own beacon, HTTP relays for a public drand chain.

    Without `relays`, those of grailnode/beacon/public_chains.py are asked. `key` names the key of the beacon that the
    trainer's node runs; it is empty where somebody else runs the beacon.
    """

    relays: tuple[str, ...] = ()
    key: str = "beacon"
    keep_rounds: Count = 1000


class EngineSection(VllmSettings, Section):
    """What computes the policy, on which device and in which precision."""

    kind: Annotated[Literal["torch", "vllm"], Field(description="What generates: torch, or a server of vLLM.")] = (
        "torch"
    )
    threads: Annotated[Count, Field(description="Threads of torch in each process.")] = 1
    max_batch_tokens: Annotated[Count, Field(description="Most padded tokens that torch computes at once.")] = 8192

    @model_validator(mode="after")
    def _check_place(self) -> "EngineSection":
        if self.kind == "vllm" and (self.python is None) == (not self.url):
            raise ValueError('kind "vllm" needs either python, the interpreter of its environment, or url')
        return self


class OuterSection(Section):
    """How the sites of a run train one policy together (docs/guide/many-trainers.md).

    All of it is the trainer's, whose coordinator puts it into the rounds' rules, but `upload_seconds`: so long before
    the end of a round a site stops its local steps. `momentum` and `outer_rate` are the method's own where they are
    missing. A round lasts `round_windows` windows, and counts with `quorum` contributions or more. With a `delay` of 1,
    sites go on with their local steps while a round closes. With `streams`, each round has a part of the tensors.
    """

    method: OuterMethod = "pulseloco"
    local_steps: Annotated[int, Field(ge=1, le=1 << 16)] = 8
    quorum: Annotated[int, Field(ge=1, le=MAX_WORKERS)] = 1
    delay: Annotated[int, Field(ge=0, le=1)] = 0
    streams: Annotated[int, Field(ge=1, le=MAX_STREAMS)] = 1
    outer_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    fraction: Annotated[int, Field(ge=0, le=8)] = 3
    chosen: Annotated[int, Field(ge=1, le=1024)] = 128
    frozen_rounds: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    round_windows: Count = 1
    state_interval: Count = 8
    payload_seconds: Positive = 30.0
    upload_seconds: Positive = 5.0


class TrainerSection(Section):
    """How the trainer learns and publishes.

    `adapters` is the directory with the adapters of version 0, for a run of adapters on `policy`.
    `loss` is one of those in roles/trainer/learn/loss/policy_loss.py, and `advantage` replaces the one that belongs to
    it; clip_low and clip_high bound the importance ratio, and `truncation` does so whatever the advantage (inf for no
    such bound). The learning rate rises over `warmup_steps`, and a schedule that is not constant takes it down to
    `final_share` of itself at `training_steps`, where training ends (0: it never ends).
    `logits_chunk` tokens have their logits in memory at once, and `recompute` trades the activations of layers for a
    second computation. `gpus` processes share the masters and the work (docs/guide/train.md).
    `track` names the tracker that shows curves and samples (grailnode/track).
    A checkpoint is written every `checkpoint_versions` versions (0: 1 with fewer than 100 million parameters, 20 with
    more), and with the next version after `checkpoint_seconds` (0: never for that reason).
    `canaries` counts the miners that the trainer has run under secret keys to test the validators; only the last of
    them runs now. Raise it by one when a report has revealed the key of the last one. `canary_store` is where the
    canary writes: in the trainer's own bucket everybody would recognize it.
    With `outer`, the run's workers train, and the trainer closes their rounds and publishes.
    """

    policy: str = "genesis"
    data: Path | None = None
    adapters: Path | None = None
    loss: LossName = "token-mean"
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    truncation: Annotated[float, Field(gt=1)] = 3.0
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    advantage: AdvantageName | Literal["of-loss"] = "of-loss"
    overlong_filtering: bool = False
    dynamic_filtering: bool = True
    learning_rate: Positive = 7e-6
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    schedule: ScheduleName = "constant"
    training_steps: Annotated[int, Field(ge=0)] = 0
    final_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Positive = 1.0
    logits_chunk: Count = 1024
    recompute: bool = False
    gpus: Count = 1
    groups_per_step: Count = 16
    steps_per_version: Count = 1
    checkpoint_versions: Annotated[int, Field(ge=0)] = 0
    checkpoint_seconds: Annotated[float, Field(ge=0)] = 0.0
    max_uses: Count = 1
    decay: Annotated[float, Field(gt=0, le=1)] = 0.7
    max_staleness: Annotated[int, Field(ge=0)] = 16
    replay_bytes: Count = 1 << 30
    anchor_interval: Count = 50
    keep_patches: Count = 100
    keep_anchors: Count = 10
    patch_profile: Literal["compact", "fast"] = "compact"
    seed: int = 0
    poll_seconds: Positive = 0.1
    track: TrackerName | None = None
    canaries: Annotated[int, Field(ge=0, le=1000)] = 0
    canary_store: StoreSection | None = None
    outer: OuterSection | None = None

    @model_validator(mode="after")
    def _check_bounds(self) -> "TrainerSection":
        check_retention(self.anchor_interval, self.keep_patches, self.keep_anchors)
        if self.schedule != "constant" and self.training_steps <= self.warmup_steps:
            raise ValueError(
                f'schedule "{self.schedule}" needs training_steps above warmup_steps = {self.warmup_steps}'
            )
        if self.truncation <= 1 + self.clip_high:
            raise ValueError(f"truncation must be above 1 + clip_high = {1 + self.clip_high:g}: the clip comes first")
        if self.outer is not None and self.canaries:
            raise ValueError("canaries need a trainer that collects groups itself; with [trainer.outer] its sites do")
        return self


class MinerSection(Section):
    """How many groups a miner delivers, and how it works on them."""

    groups: Count = 16
    chunk: Count = 8
    share: Annotated[float, Field(gt=0, le=1)] = 0.8
    poll_seconds: Positive = 0.2


class ValidatorSection(Section):
    """Whether a validator evaluates the policy on held-out problems, and how often it polls."""

    evaluate: bool = True
    poll_seconds: Positive = 0.2


class Config(Section):
    """The whole of run.toml. Relative paths are relative to the directory of the file."""

    run: RunSection = RunSection()
    store: StoreSection = StoreSection()
    node: NodeSection = NodeSection()
    beacon: BeaconSection = BeaconSection()
    engine: EngineSection = EngineSection()
    trainer: TrainerSection = TrainerSection()
    miner: MinerSection = MinerSection()
    validator: ValidatorSection = ValidatorSection()
    directory: Path = Path()

    def at(self, path: Path | str) -> Path:
        """Return a path of this file as an absolute path."""
        path = Path(path)
        return path if path.is_absolute() else self.directory / path


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read run.toml.

    Args:
        path: the file, or the directory in which it lies.
        overrides: 'section.key=value', the value in TOML's notation; a bare word is a string.

    Raises:
        ConfigError: the file is missing or is not TOML, a key is unknown, or a value is not allowed.
    """
    if path.is_dir():
        path = path / "run.toml"
    if not path.exists():
        raise ConfigError(f"{path}: no such file; `grailnode init DIR` writes one")
    values = read_toml(path)
    for override in overrides:
        _override(values, override)
    return _validate(values, str(path), path.absolute().parent)


def without_file(values: dict[str, Any], overrides: Sequence[str], directory: Path) -> Config:
    """Return a configuration from values alone, for a run that is named by its URL.

    Args:
        values: by section, as in the file; they are valid, so a fault is reported as one of the overrides'.

    Raises:
        ConfigError: as `load`.
    """
    for override in overrides:
        _override(values, override)
    return _validate(values, "--set", directory.absolute())


def _validate(values: dict[str, Any], source: str, directory: Path) -> Config:
    return validate(Config, values | {"directory": directory}, source)


def validate(model: type[Checked], values: dict[str, Any], source: str) -> Checked:
    """Return values as a model of sections.

    Args:
        source: the file, for errors.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(model, source, error)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file.

    Raises:
        ConfigError: the file is missing, cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(f"--set {override}: write --set section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = values
    *sections, name = (section, *name.split("."))
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {section} is not a section")
    table[name] = value


def _explain(model: type[Section], source: str, error: ValidationError) -> str:
    """Return the first fault as a line: where it is and what is allowed there."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":  # without a place where it is about several keys of the outermost section
        return ": ".join(filter(None, (source, place, str(first["ctx"]["error"]))))
    if first["type"] == "extra_forbidden":
        return f"{source}: unknown key {place}; known here: {', '.join(_keys_of(model, first['loc'][:-1]))}"
    if first["type"] == "tuple_type":
        return f"{source}: {place}: a list is needed: write [ ] around it"
    if first["type"] == "model_type":
        return f"{source}: {place}: is a section: write [{place}], and its keys below it"
    return f"{source}: {place}: {first['msg'].lower()} (it is {first['input']!r})"


def _keys_of(root: type[Section], section: Sequence[int | str]) -> list[str]:
    """Return the keys that a section may have, in order; the section is named by the keys that lead to it."""
    model: Any = root
    for key in section:
        is_table = get_origin(model) is dict  # a table of sections, such as store.peers, has any key
        model = get_args(model)[1] if is_table else model.model_fields[key].annotation
        if get_origin(model) is UnionType:  # an optional section
            model = get_args(model)[0]
    return sorted(set(model.model_fields) - {"directory"})
