"""docs/reference: the pages are what the source says, and every key and option is described."""

from collections.abc import Callable, Iterator

import click
import pytest

from grailnode.cli.main import cli
from grailnode.config import Config, section_of
from grailnode.run.rules import Place, Rules
from roles.settings_base import Settings
from tests.deployment.reference import PAGES, REFERENCE


@pytest.mark.parametrize(("name", "page"), PAGES.items(), ids=PAGES)
def test_a_page_is_up_to_date(name: str, page: Callable[[], str]) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == page() + "\n", "run `python -m tests.deployment.reference`"


def sections(name: str, model: type[Settings]) -> Iterator[tuple[str, type[Settings]]]:
    yield name, model
    for key, field in model.model_fields.items():
        if (inner := section_of(field.annotation)) is not None:
            yield from sections(f"{name}.{key}", inner)


SECTIONS = [*sections("rules", Rules), *sections("place", Place), *(pair for pair in sections("", Config) if pair[0])]


@pytest.mark.parametrize(("name", "model"), SECTIONS, ids=[name for name, _ in SECTIONS])
def test_every_key_is_described_by_sentences(name: str, model: type[Settings]) -> None:
    assert len(SECTIONS) >= 14
    texts = {key: field.description or "" for key, field in model.model_fields.items()}
    assert not [key for key, text in texts.items() if not text.endswith(".")]


def commands(command: click.Command, context: click.Context) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, context)


def test_every_option_is_described() -> None:
    options = [
        (command.name, option.opts[-1])
        for command in commands(cli, click.Context(cli))
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ]
    assert not options
