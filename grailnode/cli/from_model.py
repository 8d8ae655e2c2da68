"""Options of a command from the fields of a model, so that names, bounds, choices and help stand in the model alone.

An option that the command line does not have is None, or empty if it may be repeated: the model has the default.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grailnode.cli.options import FILE

_RANGES: Final = {int: click.IntRange, float: click.FloatRange}

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def options(
    model: type[BaseModel], names: Collection[str], repeated: Mapping[str, str] | None = None, **metavars: str
) -> Decorator:
    """Return a decorator that adds an option to a command for each of some fields, in their order."""
    repeated = repeated or {}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, field in reversed(model.model_fields.items()):
            if name in names:
                command = _option(name, field, repeated.get(name), metavars.get(name))(command)
        return command

    return decorate


def _option(name: str, field: FieldInfo, repeated: str | None, metavar: str | None) -> Decorator:
    kind, words = value_type(field), f"--{name.replace('_', '-')}"
    if kind is bool:
        return click.option(f"{words}/--no-{words[2:]}", name, default=None, help=help_text(field))
    text = help_text(field)
    if repeated is not None:
        words, text = repeated, f"{text} Repeat it for several."
    return click.option(
        words, name, type=_click_type(kind, field), multiple=repeated is not None, metavar=metavar, help=text
    )


def given(model: type[BaseModel], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return those parameters of a command that are fields of a model and that the command line has."""
    values = {name: value for name, value in parameters.items() if name in model.model_fields}
    return {name: value for name, value in values.items() if value is not None and value != ()}


def help_text(field: FieldInfo) -> str:
    """Return a field's description, with its default unless the description has it."""
    text, default = description(field), field.default
    if default is None or default is False or default in ("", ()) or "Default:" in text:
        return text
    return f"{text} Default: {default:g}." if isinstance(default, float) else f"{text} Default: {default}."


def description(field: FieldInfo) -> str:
    """Return a field's docstring as one line."""
    return " ".join((field.description or "").split())


def value_type(field: FieldInfo) -> Any:
    """Return the type of a field's value, or of each of its values: never None, and without bounds."""
    kind: Any = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return get_args(kind)[0] if get_origin(kind) is tuple else kind


def _click_type(kind: Any, field: FieldInfo) -> Any:
    """Return click's type for a value, which checks it as far as click can."""
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if kind is Path:
        return FILE
    if kind not in _RANGES:
        return None
    bounds: dict[str, Any] = {}
    for bound in field.metadata:
        bounds |= {name: getattr(bound, name) for name in ("ge", "gt", "le", "lt") if hasattr(bound, name)}
    return _RANGES[kind](
        min=bounds.get("ge", bounds.get("gt")),
        max=bounds.get("le", bounds.get("lt")),
        min_open="gt" in bounds,
        max_open="lt" in bounds,
    )
