"""`grailnode chat`: a line in, the policy's answer out."""

import secrets
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Final, Unpack

import click
import trio

from grailnode.chat.chat_template import ChatTemplate, ChatTemplateError
from grailnode.cli.actions.served_policy import ServedPolicy, open_policy
from grailnode.cli.options import PolicyOptions, report_line
from grailnode.ui.formatting import terminal_text
from protocol.errors import ProtocolError
from protocol.rollout.sampling import SEED_BYTES, SamplingParams
from protocol.run import ChatSpec
from roles.policy.assignment import encode_prompt
from roles.ports import Request, StoreError

_TOKENS: Final = 512  # of an answer of a checkpoint


def chat(message: str | None, max_tokens: int | None, greedy: bool, **options: Unpack[PolicyOptions]) -> None:
    if message is not None and not message.strip():
        raise click.UsageError("--message: there is nothing to answer")
    trio.run(_chat, message, max_tokens, greedy, options)


async def _chat(message: str | None, max_tokens: int | None, greedy: bool, options: PolicyOptions) -> None:
    async with open_policy(**options) as served:
        template, params = _manner(served)
        params = replace(params, max_tokens=max_tokens or params.max_tokens)
        if message is not None:
            click.echo(await _answer(served, template, params, message, greedy=greedy))
            return
        is_terminal = sys.stdin.isatty()
        report_line(f"{served.label}: write a line; Ctrl-D ends")
        while line := await _read_line("> " if is_terminal else ""):
            if not line.strip():
                continue
            await _update(served)
            click.echo(await _answer(served, template, params, line.rstrip("\r\n"), greedy=greedy))
        if is_terminal:
            click.echo()


async def _read_line(mark: str) -> str:
    """Return the next line of standard input; empty at its end. Ctrl-C abandons the thread that reads."""
    click.echo(mark, nl=False)
    # Python ends badly while a thread reads through the buffer of standard input, whose lock it holds.
    with open(0, "rb", buffering=0, closefd=False) as unbuffered:
        line = await trio.to_thread.run_sync(unbuffered.readline, abandon_on_cancel=True)
    return line.decode(errors="replace")


async def _update(served: ServedPolicy) -> None:
    """Serve a newer version, if there is one that can be fetched and verified; else the last one goes on."""
    before = served.label
    try:
        await served.update()
    except (StoreError, ProtocolError) as error:
        report_line(f"cannot follow now: {error}")
    if served.label != before:
        report_line(f"now {served.label}")


def _manner(served: ServedPolicy) -> tuple[ChatSpec | None, SamplingParams]:
    """Return the chat template and the sampling: of the run, or of the checkpoint as far as it has any."""
    if served.task is not None:
        return served.task.run.chat, served.task.run.sampling.params()
    chat = None
    with suppress(ChatTemplateError):  # a tokenizer without a template
        chat = ChatTemplate.read(served.policy.directory).chat("", [])
    return chat, SamplingParams(1.0, _TOKENS, served.policy.stops)


async def _answer(
    served: ServedPolicy, template: ChatSpec | None, params: SamplingParams, text: str, *, greedy: bool
) -> str:
    """Return the policy's answer to a text, without characters that act on a terminal."""
    prompt = encode_prompt(served.policy.tokenizer, template, text.encode(errors="replace").decode())
    seed = b"" if greedy else secrets.token_bytes(SEED_BYTES)
    (generation,) = await served.engine.generate([Request(prompt, seed)], params)
    return terminal_text(served.policy.tokenizer.decode(params.without_stop(generation.tokens)))
