"""The text of run.toml, with comments for the operator, as `grailnode init` writes it; and recipes of runs.

Each key stands below its description in grailnode/config.py, and has the value that is given, or else its default.

A recipe is a TOML file with the constants of a run, for `grailnode init --recipe FILE`. Its section [rules] has what
all nodes must agree on, which `init` signs in the manifest; its other sections go to run.toml as they are.
docs/reference/config.md lists each key, docs/examples has recipes.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import tomlkit

from grailnode.beacon.relays import RELAYS
from grailnode.config import Config, EngineSection, OuterSection, TrainerSection, read_toml, section_of, validate
from grailnode.run.buckets import Bucket
from grailnode.run.rules import Rules
from protocol.beacon import ChainInfo
from roles.miner.miner_settings import MinerSettings
from roles.settings_base import Settings
from roles.validator.validator_settings import ValidatorSettings

Value = str | int | float | Sequence[str] | Mapping[str, "Value"] | None
"""Of a key; None leaves the key out of the file, and a mapping is a section in the section."""

Sections = Mapping[str, Mapping[str, Value]]
"""Values by section and key."""

_WIDTH: Final = 100  # columns of comments

_HEADER: Final = """\
A grailnode run on this machine. These, each in a terminal of its own, make the network:
{starts}
Any key can be overridden for one start: --set miner.groups=8. docs/reference/config.md has every key.
Paths are relative to this file. Secrets are not in it: they are in keys/, readable by their owner alone.
"""

_SHOWN: Final[Mapping[str, Sequence[str]]] = {
    "run": ("manifest", "id"),
    "store": ("kind", "path"),
    "node": ("keys", "state", "logs", "metrics_port"),
    "beacon": ("key",),
    "engine": ("device", "dtype", "threads"),
    "trainer": (
        *("data", "wheels", "adapters", "policy", "loss", "learning_rate", "warmup_steps", "groups_per_step"),
        *("steps_per_version", "max_uses", "decay", "max_staleness", "anchor_interval", "patch_profile"),
    ),
    "miner": ("groups",),
    "validator": ("evaluate",),
}
"""The keys that a new file shows, with their defaults where no values are given; other keys are shown if one is."""


def for_new_run(values: Sections, starts: Sequence[str], bucket: Bucket | None, beacon: ChainInfo | None) -> str:
    """Return the run.toml of a run that is created here, with the values that differ from the defaults. The run is
    stored and its participants meet in a bucket, or else a directory of this machine; without a public beacon it has
    one of its own.
    """
    header = _HEADER.format(starts="\n".join(f"  {start}" for start in starts))
    lines = [f"# {line}" for line in header.splitlines()]
    for name, keys in _SHOWN.items():
        section = _defaults(_model(name), keys) | dict(values.get(name, {}))
        if isinstance(outer := section.get("outer"), Mapping):
            section["outer"] = _defaults(OuterSection, ("method", "quorum")) | dict(outer)
        if name == "store" and bucket is not None:
            section = _buckets(bucket, bucket, meeting_credentials="s3.credentials")
        if name == "beacon" and beacon is not None:
            section = {"key": "", "relays": RELAYS.get(beacon.chain_hash, ())}
        lines += ["", f"[{name}]", *_section(name, _model(name), section)]
    return "\n".join(lines) + "\n"


def for_member(manifest: str, run_id: str, bucket: Bucket, meeting: Bucket) -> str:
    """Return the run.toml of a node that joins somebody else's run, with credentials for the meeting point."""
    store = _buckets(bucket, meeting, meeting_credentials="meeting.credentials")
    sections: Sections = {"run": {"manifest": manifest, "id": run_id}, "store": store, "beacon": {"key": ""}}
    lines: list[str] = []
    for name, section in sections.items():
        lines += ["", f"[{name}]", *_section(name, _model(name), section)]
    return "\n".join(lines[1:]) + "\n"


def _model(section: str, outer: type[Settings] = Config) -> type[Settings]:
    model = section_of(outer.model_fields[section].annotation)
    assert model is not None
    return model


def _defaults(model: type[Settings], keys: Sequence[str]) -> dict[str, Value]:
    defaults = {key: model.model_fields[key].default for key in keys}
    return {key: str(default) if isinstance(default, Path) else default for key, default in defaults.items()}


def _section(name: str, model: type[Settings], values: Mapping[str, Value]) -> Iterator[str]:
    """Yield the lines of a section after its header, and then the sections in it."""
    for key, value in values.items():
        if value is not None and not isinstance(value, Mapping):
            yield from _comment(model, key)
            yield f"{key} = {tomlkit.item(value).as_string()}"
    for key, inner in values.items():
        if isinstance(inner, Mapping):
            yield from ("", f"[{name}.{key}]", *_comment(model, key))
            yield from _section(f"{name}.{key}", _model(key, model), inner)


def _comment(model: type[Settings], key: str) -> Iterator[str]:
    field = model.model_fields[key]
    text = field.description or ""
    if get_origin(field.annotation) is Literal:
        text += f" One of {', '.join(get_args(field.annotation))}."
    for line in textwrap.wrap(text, _WIDTH - 2):
        yield f"# {line}"


def _buckets(own: Bucket, meeting: Bucket, *, meeting_credentials: str) -> dict[str, Value]:
    return {**_place(own, "s3.credentials"), "meeting": _place(meeting, meeting_credentials)}


def _place(bucket: Bucket, credentials: str) -> dict[str, Value]:
    place = {key: value or None for key, value in bucket.section.items()}
    return {**place, "credentials": credentials, "url": bucket.url}


DEMO: Final = Path(__file__).parents[1] / "data" / "demo.toml"
"""The recipe of `grailnode demo`."""


class Recipe(Settings):
    """A recipe's sections; those beside `rules` are sections of run.toml."""

    rules: Rules = Rules()
    engine: EngineSection = EngineSection()
    trainer: TrainerSection = TrainerSection()
    miner: MinerSettings = MinerSettings()
    validator: ValidatorSettings = ValidatorSettings()


def read_recipe(path: Path | None, options: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe, by default the default one, in which rules from the command line of `init` replace others."""
    recipe = Recipe() if path is None else validate(Recipe, read_toml(path), str(path))
    if not options:
        return recipe
    rules = validate(Rules, recipe.rules.model_dump(exclude_unset=True) | dict(options), "init")
    return recipe.model_copy(update={"rules": rules})
