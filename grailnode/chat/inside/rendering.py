"""Renders a chat template as transformers does: JSON on standard input, JSON on standard output.

A template is code of whoever made the checkpoint. It runs in a process of its own, with limits on processor time and
memory, in the sandbox of jinja2: no attributes that begin with an underscore, no changes to its arguments. It finds no
clock and no randomness, so that it gives the same text each time.

This file is run by its path; it imports the standard library and jinja2 alone.
"""

import json
import resource
import sys
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 4
MEMORY_BYTES = 512 << 20
MAX_CHARACTERS = 16 << 20  # of all texts together


class GenerationBlocks(Extension):
    """The tags {% generation %} and {% endgeneration %}, which mark what an assistant wrote; the text stays."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of transformers without its clock, and without jinja2's sources of randomness."""
    result = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=[GenerationBlocks, loopcontrols]
    )
    result.filters["tojson"] = to_json
    result.globals["raise_exception"] = refuse
    del result.filters["random"], result.globals["lipsum"]
    return result


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return a value as JSON, without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def refuse(message: object) -> None:
    """Raise what a template refuses a conversation with."""
    raise TemplateError(str(message))


def render(template: str, variables: dict[str, str], conversations: list[Any]) -> list[str]:
    """Return the text of each conversation up to the assistant's next message; TemplateError if one is refused."""
    compiled = environment().from_string(template)
    texts: list[str] = []
    for messages in conversations:
        arguments = {**variables, "messages": messages, "tools": None, "documents": None}
        texts.append(compiled.render(**arguments, add_generation_prompt=True))
        if sum(map(len, texts)) > MAX_CHARACTERS:
            raise TemplateError(f"it writes more than {MAX_CHARACTERS} characters")
    return texts


def main() -> None:
    """Answer one request: {"texts": [...]}, or {"error": "..."}."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        answer: dict[str, Any] = {"texts": render(**json.load(sys.stdin))}
    except MemoryError:
        answer = {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # noqa: BLE001 - a template can raise what it likes; it is the only thing that runs here
        answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
