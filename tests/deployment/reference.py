"""Writes docs/reference from the models of the configuration and the declarations of commands and metrics:

python -m tests.deployment.reference
"""

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from grailnode.cli.from_model import description, value_type
from grailnode.cli.main import cli
from grailnode.config import Config, section_of
from grailnode.node.metrics import SPECS
from grailnode.run.rules import Rules, TimingRules
from roles.settings_base import Settings

REFERENCE: Final = Path(__file__).parents[2] / "docs" / "reference"

_GENERATED: Final = "`python -m tests.deployment.reference` writes this page from the source; do not edit it."
_CONFIG_INTRODUCTION: Final = f"""\
# Every key of run.toml and of a recipe

{_GENERATED}

`grailnode init` writes run.toml with the keys that most operators change; every other key may be added, or set for one
start with `--set section.key=value`. Relative paths are relative to the directory of the file. A recipe
(`grailnode init --recipe FILE`) has the section `[rules]` below, and may have the sections `[engine]`, `[trainer]`,
`[miner]` and `[validator]` of run.toml.
"""
_RULES_INTRODUCTION: Final = """
## `[rules]` of a recipe

What all nodes of a run must agree on: `grailnode init` signs it in the manifest, and it never changes. An option of
`init` of the same name replaces a key. [own-task.md](../guide/own-task.md) says more.
"""
_CLI_INTRODUCTION: Final = f"""\
# Every command and its options

{_GENERATED}
"""
_METRICS_INTRODUCTION: Final = f"""\
# Every metric

{_GENERATED}

With `node.metrics_port`, each process serves these on 127.0.0.1, with the label `node` and the usual `process_*`.
`docker/monitoring` has alert rules and a dashboard of Grafana that use them.

| metric | type | other labels | what it is |
|---|---|---|---|
"""
_TYPES: Final = {int: "integer", float: "number", str: "text", Path: "path", bool: "true or false"}
_BOUNDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def config_page() -> str:
    parts = [_CONFIG_INTRODUCTION]
    for name, field in Config.model_fields.items():
        if (model := section_of(field.annotation)) is not None:
            parts += _section(name, model)
    timing = [name for name in Rules.model_fields if name in TimingRules.model_fields]
    options = [name for name in Rules.model_fields if name not in timing]
    parts += [_RULES_INTRODUCTION, _table(Rules, options)]
    parts += ["\n## Rules without an option\n\n" + _text(TimingRules) + "\n", _table(Rules, timing)]
    return "\n".join(parts)


def _section(name: str, model: type[Settings]) -> Iterator[str]:
    """Yield the heading, the text and the table of a section, and then the sections in it that have other keys."""
    yield f"\n## `[{name}]`\n\n{_text(model)}\n"
    yield _table(model, list(model.model_fields))
    for key, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None and not _has_keys_of_store(inner):
            yield from _section(f"{name}.{key}", inner)


def _has_keys_of_store(model: type[Settings]) -> bool:
    store = section_of(Config.model_fields["store"].annotation)
    assert store is not None
    return issubclass(store, model)


def _text(model: type[Settings]) -> str:
    return textwrap.fill(" ".join(inspect.cleandoc(model.__doc__ or "").split()), 120)


def _table(model: type[Settings], names: list[str]) -> str:
    rows = ["| key | value | default | what it is |", "|---|---|---|---|"]
    for name in names:
        field = model.model_fields[name]
        rows.append(f"| `{name}` | {_value(name, field)} | {_default(field)} | {description(field)} |")
    return "\n".join(rows)


def _value(name: str, field: FieldInfo) -> str:
    """Return what may stand behind a key, in words."""
    if (inner := section_of(field.annotation)) is not None:
        keys = "as `[store]`" if _has_keys_of_store(inner) else "below"
        return f"sections named by a key, {keys}" if get_origin(field.annotation) is dict else f"section, {keys}"
    several = "list of " if get_origin(field.annotation) is tuple else ""
    literals = _literals(field.annotation)
    if literals:
        return several + ", ".join(f"`{literal}`" for literal in literals)
    bounds = [f"{_BOUNDS[kind]} {limit:g}" if isinstance(limit, float) else f"{_BOUNDS[kind]} {limit}"
              for kind, limit in limits(field)]  # fmt: skip
    words = ", ".join([_TYPES[value_type(field)], *bounds])
    return several + words


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) in (tuple, Union, UnionType):
        return [literal for part in get_args(annotation) for literal in _literals(part)]
    return []


def limits(field: FieldInfo) -> Iterator[tuple[str, Any]]:
    """Yield the bounds of a field's value: the kind of each, and the limit."""
    for bound in field.metadata:
        for kind in _BOUNDS:
            if hasattr(bound, kind):
                yield kind, getattr(bound, kind)


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is None or default in ("", (), {}):
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def cli_page() -> str:
    return "\n".join([_CLI_INTRODUCTION, *_command("grailnode", cli, None)])


def metrics_page() -> str:
    rows = [f"| `{spec.name}` | {spec.kind} | {', '.join(spec.labels)} | {spec.help} |" for spec in SPECS]
    return _METRICS_INTRODUCTION + "\n".join(rows)


def _command(name: str, command: click.Command, parent: click.Context | None) -> Iterator[str]:
    """Yield the heading, the help and the options of a command, and then those of its own commands."""
    context = click.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    arguments = [param.make_metavar(context) for param in command.params if isinstance(param, click.Argument)]
    yield f"\n## `{' '.join([name, *arguments])}`\n"
    yield inspect.cleandoc(command.help or "") + "\n"
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    if options:
        yield "| option | value | what it is |\n|---|---|---|"
        yield from (_option(option) for option in options)
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            inner = command.get_command(context, word)
            assert inner is not None
            yield from _command(f"{name} {word}", inner, context)


def _option(option: click.Option) -> str:
    names = " / ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    text = option.help or ""
    if option.show_default and option.default is not None:
        text = f"{text} Default: {option.default}.".strip()
    if option.required:
        text = f"{text} Required.".strip()
    return f"| {names} | {_option_value(option)} | {text} |"


def _option_value(option: click.Option) -> str:
    """Return what may stand behind an option, in words; empty for a switch."""
    if option.is_flag:
        return ""
    match option.type:
        case click.Choice(choices=choices):
            return ", ".join(f"`{choice}`" for choice in choices)
        case click.IntRange() | click.FloatRange():
            kind = "integer" if isinstance(option.type, click.IntRange) else "number"
            least = None if option.type.min is None else f"{'above' if option.type.min_open else 'at least'}"
            most = None if option.type.max is None else f"{'below' if option.type.max_open else 'at most'}"
            bounds = [f"{word} {limit:.12g}" for word, limit in ((least, option.type.min), (most, option.type.max))
                      if word is not None and limit is not None]  # fmt: skip
            return ", ".join([kind, *bounds])
        case click.Path():
            return f"`{option.metavar}`" if option.metavar else "directory" if option.type.dir_okay else "file"
    return f"`{option.metavar}`" if option.metavar else option.type.name


PAGES: Final = {"config.md": config_page, "cli.md": cli_page, "metrics.md": metrics_page}


def main() -> None:
    REFERENCE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
