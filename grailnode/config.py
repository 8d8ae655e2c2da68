"""run.toml: which run a node takes part in, where its store, keys and state are, and what its operator decides.

The file is read once and passed on as values. Every key can be overridden on the command line
(`--set trainer.learning_rate=2e-5`). It holds no secrets: keys are in files that only their owner can read, and storage
credentials come from such a file or from the environment.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import Field, ValidationError, model_validator

from grailnode import UserError
from grailnode.engine.vllm.installation import find_python
from grailnode.engine.vllm.vllm_settings import VllmSettings
from grailnode.store.place import Count, PlaceSection, Positive
from protocol.limits import MAX_STREAMS, MAX_WORKERS
from roles.miner.miner_settings import MinerSettings
from roles.settings_base import Settings
from roles.trainer.learn.loss.loss_settings import LossSettings
from roles.trainer.learn.training_settings import ReplaySettings, TrainingSettings
from roles.trainer.publish.retention import check_retention
from roles.validator.validator_settings import ValidatorSettings

TrackerName = Literal["tensorboard", "wandb", "trackio"]
OuterMethod = Literal["pulseloco", "pulseloco-exact", "sparseloco", "diloco", "averaging"]


Checked = TypeVar("Checked", bound=Settings)


class RunSection(Settings):
    """Which run the node takes part in."""

    manifest: str = "run.manifest"
    """The signed rules that all nodes share: a file or a URL."""
    id: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """The id that the manifest must have; empty accepts any."""


PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoreSection(PlaceSection):
    """Where this node writes, and where it reads what others write."""

    meeting: PlaceSection | None = None
    """Where participants announce themselves. Without it all nodes of the run share this store; with it each has its
    own.
    """
    peers: dict[PublicKey, PlaceSection] = Field(default_factory=dict)
    """Where the objects of a key are, whatever the key announces."""
    private_addresses: bool = False
    """Whether announced URLs may point into private networks or, by plain http, to any server of this machine."""

    @model_validator(mode="after")
    def _check_url(self) -> "StoreSection":
        if self.meeting is not None and not self.url:
            raise ValueError("where participants meet elsewhere, url says where they read what this node writes")
        return self


class NodeSection(Settings):
    """Where this machine keeps keys, state, logs and downloads."""

    keys: Path = Path("keys")
    """The directory of keys: one file for each name."""
    state: Path = Path("state")
    """The directory of states: one directory for each name. Two processes never share one."""
    logs: Path = Path("logs")
    """The directory of logs: one file of JSON lines for each process."""
    cache: Path = Path("cache")
    """Downloads, shared by all nodes of the machine; a local store needs none."""
    cache_bytes: Count = 20 << 30
    """The cache is never larger."""
    metrics_port: int = Field(default=0, ge=0, le=65_000)
    """The port of 127.0.0.1 that serves /metrics for Prometheus, 0 for none. The processes of a trainer take the next
    ports too.
    """
    alarm_url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Receives each alarm as a POST of JSON: at most one of a kind from each process in ten minutes; empty for none."""


class BeaconSection(Settings):
    """Where public randomness comes from: the store for a run's own beacon, HTTP relays for a public drand chain."""

    relays: tuple[str, ...] = ()
    """URLs of relays of a public chain, in the order in which they are asked; without any, those of
    grailnode/beacon/relays.py.
    """
    key: str = "beacon"
    """The key of the run's own beacon, which the trainer's node runs; empty where somebody else runs the beacon."""
    keep_rounds: Count = 1000
    """Rounds of the run's own beacon that storage keeps."""


class EngineSection(VllmSettings):
    """What computes the policy, on which device and in which precision."""

    kind: Literal["torch", "vllm"] = "torch"
    """What generates: torch, or a server of vLLM. A trainer's learner always computes with torch."""
    threads: Count = 1
    """Threads of torch in each process."""
    max_batch_tokens: Count = 8192
    """Most padded tokens that torch computes at once."""
    draft: Literal["int8"] | None = None
    """For torch: an 8-bit copy of the policy drafts a miner's tokens, and the policy checks each in a prefill."""

    @model_validator(mode="after")
    def _check_place(self) -> "EngineSection":
        if self.kind == "vllm" and self.python is not None and self.url:
            raise ValueError('kind "vllm" takes python, the interpreter of its environment, or url; drop one of them')
        if self.kind == "vllm" and self.draft is not None:
            raise ValueError('drafts are for kind "torch": drop draft')
        return self


class OuterSection(Settings):
    """How the sites of a run train one policy together (docs/guide/many-trainers.md).

    All of it is the trainer's, whose coordinator puts it into the rounds' rules, but `upload_seconds`.
    """

    method: OuterMethod = "pulseloco"
    """What sites send, and how it changes the shared weights."""
    local_steps: int = Field(default=8, ge=1, le=1 << 16)
    """Steps of a site in a round."""
    quorum: int = Field(default=1, ge=1, le=MAX_WORKERS)
    """Contributions that a round needs."""
    delay: int = Field(default=0, ge=0, le=1)
    """1: sites go on with their local steps while a round closes."""
    streams: int = Field(default=1, ge=1, le=MAX_STREAMS)
    """Into how many parts the tensors are divided; a round has one of them."""
    spread: int = Field(default=0, ge=0, le=1)
    """1: the sites compare the contributions of a round together, each a share of the tensors."""
    outer_rate: float | None = Field(default=None, gt=0, le=10)
    """Of the outer step. Default: the method's."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Of the outer step; 0 is the plain step. Default: the method's."""
    fraction: int = Field(default=3, ge=0, le=8)
    """Of pulseloco: values are multiples of 2^-fraction units in the last place."""
    chosen: int = Field(default=128, ge=1, le=1024)
    """Of sparseloco: entries sent of each 4096."""
    frozen_rounds: int = Field(default=0, ge=0, lt=1 << 32)
    """Rounds that change the weights before error feedback begins."""
    round_windows: Count = 1
    """Windows of a round."""
    state_interval: Count = 8
    """Rounds between two states in storage, from which new sites begin."""
    payload_seconds: Positive = 30.0
    """How long the coordinator waits when a round is over: for contributions, for payloads, and for sites' shares."""
    upload_seconds: Positive = 5.0
    """So long before the end of a round a site stops its local steps."""


class HostsSection(Settings):
    """Machines whose GPUs train together (docs/guide/train.md)."""

    count: int = Field(default=2, ge=2, le=1 << 10)
    """Machines, each with `gpus` GPUs."""
    number: int = Field(default=0, ge=0)
    """Which of them this is. Machine 0 has the key and does all but the training of the others."""
    meeting: str = Field(default="", pattern=r"^([^:/\[\]]+:[0-9]{1,5})?$")
    """`ADDRESS:PORT` of machine 0 in a network that nobody else is on: the port needs no password."""


class TrainerSection(ReplaySettings, TrainingSettings, LossSettings):
    """How the trainer learns and publishes (docs/guide/train.md)."""

    policy: str = "genesis"
    """The packaged policy, genesis, or a directory with a Hugging Face checkpoint."""
    data: Path | None = None
    """The file of problems, as named in the manifest."""
    wheels: Path | None = None
    """The directory with the wheels of a plug-in's task, as named in the manifest."""
    adapters: Path | None = None
    """The directory with the adapters of version 0, for a run of LoRA adapters on the policy."""
    logits_chunk: Count = 1024
    """Tokens whose logits are in memory at the same time."""
    recompute: bool | None = None
    """Compute the activations of layers a second time instead of keeping them. Default: with 100 million parameters or
    more.
    """
    packing: bool = False
    """Put the rollouts of a pass into one row without pads, where nothing but attention mixes tokens."""
    gpus: Count = 1
    """Processes that share a step, each with a GPU of its own."""
    hosts: HostsSection | None = None
    """With this section several machines share a step."""
    anchor_interval: Count = 25
    """Most versions between two full checkpoints in storage. One is made earlier when it has fewer bytes than the
    patches since the last one.
    """
    keep_patches: Count = 100
    """The newest patches that storage keeps."""
    keep_anchors: Count = 10
    """The newest full checkpoints that storage keeps."""
    patch_profile: Literal["compact", "fast"] = "compact"
    """How patches are coded; fast ones are encoded and applied in less time, and have more bytes."""
    seed: int = 0
    """Seed of the draws of groups."""
    poll_seconds: Positive = 0.1
    """How often to look for verdicts."""
    external: bool = False
    """Another program trains, through grailnode.library (docs/guide/own-trainer.md)."""
    track: TrackerName | None = None
    """The tracker that shows curves and samples."""
    canaries: int = Field(default=0, ge=0, le=1000)
    """Miners that the trainer has run under secret keys to test the validators; only the last of them runs now. Raise
    it by one when a report has revealed the key of the last one.
    """
    canary_store: StoreSection | None = None
    """Where the canary writes: in the trainer's own bucket everybody would recognize it."""
    outer: OuterSection | None = None
    """With this section the run's workers train, and the trainer closes their rounds."""

    @property
    def filters_groups(self) -> bool:
        """Whether groups whose rewards do not differ are left out: never if the loss learns from them."""
        return self.dynamic_filtering and self.needs_contrast

    @property
    def host(self) -> int:
        """The number of this machine among those that train together."""
        return self.hosts.number if self.hosts else 0

    @property
    def ranks(self) -> int:
        """How many processes share a step."""
        return self.gpus * (self.hosts.count if self.hosts else 1)

    @model_validator(mode="after")
    def _check_bounds(self) -> "TrainerSection":
        check_retention(self.anchor_interval, self.keep_patches, self.keep_anchors)
        if self.ranks > 1 and self.optimizer == "adamw-8bit":
            raise ValueError(f"{self.ranks} processes need another optimizer: 8-bit moments are blocks, and not rows")
        port = int("0" + self.hosts.meeting.rpartition(":")[2]) if self.hosts else 1
        if self.hosts is not None and (self.host >= self.hosts.count or not 0 < port < (1 << 16) - 1):
            rule = "`meeting` is the ADDRESS:PORT of host 0, with a port from 1 to 65534"
            raise ValueError(f"hosts: `number` is below `count`, and {rule}")
        if self.outer is not None and self.canaries:
            raise ValueError("canaries need a trainer that collects groups itself; with [trainer.outer] its sites do")
        return self


class Config(Settings):
    """The whole of run.toml. Relative paths are relative to the directory of the file."""

    run: RunSection = RunSection()
    store: StoreSection = StoreSection()
    node: NodeSection = NodeSection()
    beacon: BeaconSection = BeaconSection()
    engine: EngineSection = EngineSection()
    trainer: TrainerSection = TrainerSection()
    miner: MinerSettings = MinerSettings()
    validator: ValidatorSettings = ValidatorSettings()
    directory: Path = Path()

    def at(self, path: Path | str) -> Path:
        """Return a path of this file as an absolute path."""
        path = Path(path)
        return path if path.is_absolute() else self.directory / path

    @property
    def vllm_python(self) -> Path | None:
        """The interpreter with which a node starts vLLM; None for a server that somebody else runs."""
        if self.engine.url:
            return None
        return find_python("engine.python") if self.engine.python is None else self.at(self.engine.python)


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read run.toml, by its path or that of its directory; UserError if it is missing, empty or not TOML, a key is
    unknown, or a value is not allowed.

    An override is 'section.key=value', the value in TOML's notation; a bare word is a string.
    """
    if path.is_dir():
        path = path / "run.toml"
    if not path.exists():
        advice = "a URL begins with https://" if ":/" in str(path) else "`grailnode init DIR` writes one"
        raise UserError(f"{path}: no such file; {advice}")
    if not path.stat().st_size:  # as a full disk leaves it; a node would go on with the default of each key
        raise UserError(f"{path}: empty; restore it from a copy")
    return _config(read_toml(path), overrides, str(path), path.absolute().parent)


def without_file(values: dict[str, Any], overrides: Sequence[str], directory: Path) -> Config:
    """Return a configuration from valid values by section alone, for a run that is named by its URL."""
    return _config(values, overrides, "--set", directory.absolute())


def _config(values: dict[str, Any], overrides: Sequence[str], source: str, directory: Path) -> Config:
    for override in overrides:
        _override(values, override)
    return validate(Config, values | {"directory": directory}, source)


def validate(model: type[Checked], values: dict[str, Any], source: str) -> Checked:
    """Return values as a model of sections; UserError, with the source, for an unknown key or a bad value."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(_explain(model, source, error)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file; UserError if it is missing, cannot be read, or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML: {error}") from error


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise UserError(f"--set {override}: write --set section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = values
    *sections, name = (section, *name.split("."))
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override}: {section} is not a section")
    table[name] = value


def _explain(model: type[Settings], source: str, error: ValidationError) -> str:
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
    message = first["msg"]
    return f"{source}: {place}: {message[0].lower()}{message[1:]} (it is {first['input']!r})"


def section_of(annotation: Any) -> type[Settings] | None:
    """Return the section that a field's value is, or that each value of its table is; None for another value."""
    if get_origin(annotation) is dict:  # a table of sections, such as store.peers, has any key
        return section_of(get_args(annotation)[1])
    if get_origin(annotation) is UnionType:  # an optional section
        return section_of(get_args(annotation)[0])
    return annotation if isinstance(annotation, type) and issubclass(annotation, Settings) else None


def _keys_of(root: type[Settings], section: Sequence[int | str]) -> list[str]:
    """Return the keys that a section may have, in order; the section is named by the keys that lead to it."""
    model, parts = root, iter(section)
    for part in parts:
        annotation = model.model_fields[str(part)].annotation
        if get_origin(annotation) is dict:
            next(parts)
        inner = section_of(annotation)
        assert inner is not None
        model = inner
    return sorted(set(model.model_fields) - {"directory"})
