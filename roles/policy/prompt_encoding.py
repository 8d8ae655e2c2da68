"""The encoding of prompts: every node that reads, writes or checks a prompt does it here."""

from typing import Protocol

from protocol.run import ChatSpec


class Tokenizer(Protocol):
    """Text to token ids and back, the same on every node."""

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """The token ids of a text; with the tokens that the tokenizer puts around every text, if `special`."""

    def decode(self, tokens: tuple[int, ...]) -> str:
        """The text of token ids; any ids of the vocabulary."""


def encode_prompt(tokenizer: Tokenizer, chat: ChatSpec | None, text: str) -> tuple[int, ...]:
    """Return the token ids of the prompt for a problem's text (docs/spec/run.md).

    Args:
        chat: how the text becomes a conversation; None where it is the prompt.
    """
    return tokenizer.encode(text) if chat is None else tokenizer.encode(chat.prompt(text), special=False)
