"""The chat template of a policy's tokenizer, rendered once to the text that stands around every prompt of a run."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from grailnode import UserError
from grailnode.chat.inside import rendering
from grailnode.engine.policy import read_json, read_text
from protocol import limits
from protocol.errors import ProtocolError
from protocol.run import ChatSpec

_CONFIG: Final = "tokenizer_config.json"
_TEMPLATE: Final = "chat_template.jinja"
_WALL_SECONDS: Final = 300.0
_MARKER: Final = "Marker7391"
"""Stands for a prompt while the template is rendered."""
_ANSWER: Final = "Marker5208"
_REPLY: Final = "Marker9164"
_THOUGHT: Final = "Marker8035"
_CHECKED_PROMPTS: Final = 512
_CHECKED_CHARACTERS: Final = 4 << 20


class ChatTemplateError(UserError):
    """A template that gives no prompts for a run; the message says why, and what to do."""


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's template in the language of jinja2, with the texts of its special tokens such as `bos_token`."""

    source: Path
    text: str
    variables: dict[str, str]

    @classmethod
    def read(cls, directory: Path) -> "ChatTemplate":
        """Return the template of chat_template.jinja or tokenizer_config.json; ChatTemplateError if there is none."""
        config = read_json(directory / _CONFIG) if (directory / _CONFIG).is_file() else {}
        source = directory / _TEMPLATE
        text = read_text(source) if source.is_file() else None
        if text is None:
            source, text = directory / _CONFIG, _default_template(config.get("chat_template"))
        if text is None:
            raise ChatTemplateError(
                f"{directory}: the tokenizer has no chat template ({_TEMPLATE}, or chat_template in {_CONFIG}); take "
                "the instruct version of the model, or leave --chat out"
            )
        tokens = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
        return cls(source, text, {name: token for name, token in tokens.items() if token is not None})

    def chat(self, system: str, prompts: Sequence[str]) -> ChatSpec:
        """Render the template to the text around a prompt, and check that it gives that text around some prompts."""
        checked: list[str] = []
        for prompt in prompts[:_CHECKED_PROMPTS]:
            if sum(map(len, checked)) + len(prompt) <= _CHECKED_CHARACTERS:
                checked.append(prompt)
        texts = self._render(system, *[(prompt,) for prompt in (_MARKER, f" \n{_MARKER}\t\n ", *checked)])
        before, marker, after = texts[0].partition(_MARKER)
        if not marker or _MARKER in after:
            raise self._error("it does not write the user's message exactly once")
        if system.strip() not in before + after:
            raise self._error("it leaves the system prompt out; put it into the problems, or leave --system-prompt out")
        trim = texts[1] != f"{before} \n{_MARKER}\t\n {after}"
        template = hashlib.sha256(self.text.encode()).digest()
        try:
            chat = ChatSpec(template=template, system=system, before=before, after=after, trim=trim)
            chat.to_bytes()
        except (ProtocolError, ValueError) as error:
            raise self._error(
                f"a manifest has no room for the text around a prompt ({len(before)} and {len(after)} characters; at "
                f"most {limits.MAX_STRING_BYTES} bytes each); shorten the system prompt"
            ) from error
        for prompt, text in zip([f" \n{_MARKER}\t\n ", *checked], texts[1:], strict=True):
            if text != chat.prompt(prompt):
                raise self._error(f"it changes the prompt {prompt[:40]!r}...")
        return chat

    def with_turns(self, chat: ChatSpec, stops: Sequence[str]) -> tuple[ChatSpec, bool]:
        """Render a conversation of two turns, and return the chat with the text around a reply; and whether the
        template changes what was said before, which no episode does.

        The text around a reply does not repeat the tokens that end a turn.
        """
        answers = (_ANSWER, f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}")
        text, with_thought = self._render(chat.system, *[(_MARKER, answer, _REPLY) for answer in answers])
        past, marker, rest = text.partition(_ANSWER)
        before, reply_marker, after = rest.partition(_REPLY)
        if not (marker and reply_marker) or any(name in before + after for name in (_ANSWER, _REPLY)):
            raise self._error("it does not write each message of two turns exactly once")
        changes = past != chat.prompt(_MARKER) or _THOUGHT not in with_thought
        before = before.removeprefix(next((stop for stop in stops if stop and before.startswith(stop)), ""))
        return chat.model_copy(update={"turn_before": before, "turn_after": after}), changes

    def _render(self, system: str, *conversations: Sequence[str]) -> list[str]:
        """Return the text of each conversation, whose messages are the user's and the assistant's in turn."""
        first = [{"role": "system", "content": system}] if system else []
        roles = ("user", "assistant")
        messages = [
            [*first, *({"role": roles[place % 2], "content": text} for place, text in enumerate(texts))]
            for texts in conversations
        ]
        request = json.dumps({"template": self.text, "variables": self.variables, "conversations": messages})
        try:
            process = subprocess.run(
                [sys.executable, "-I", rendering.__file__],
                input=request.encode(),
                capture_output=True,
                timeout=_WALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self._error(f"it was not rendered in {_WALL_SECONDS:g} s") from None
        if process.returncode:
            limit = f"it takes more than {rendering.CPU_SECONDS} s, or {rendering.MEMORY_BYTES >> 20} MiB of memory"
            raise self._error(f"{limit} (exit status {process.returncode})")
        answer = json.loads(process.stdout)
        if "error" in answer:
            cause = "".join(character if character.isprintable() else " " for character in answer["error"])
            raise self._error(f"it cannot be rendered ({' '.join(cause.split())})")
        return list(answer["texts"])

    def _error(self, what: str) -> ChatTemplateError:
        return ChatTemplateError(f"{self.source}: the chat template cannot be used: {what}")


def _default_template(value: Any) -> str | None:
    """Return the template of that name where a tokenizer has several."""
    if isinstance(value, list):
        templates_by_name = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = templates_by_name.get("default")
    return value if isinstance(value, str) else None


def _token_text(value: Any) -> str | None:
    """Return the text of a special token, which a config gives as it is or as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
