"""`grailnode dashboard`: serve a live page of a run, from what its storage shows.

One task reads the run, and every viewer gets what that task has read. A viewer's page keeps itself new: it asks every
two seconds for the sections that changed since the revision that it has, and for the time of this machine.
"""

import gzip
import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Unpack
from urllib.parse import urlsplit

import click
import trio

from grailnode import UserError
from grailnode.cli.options import RunOptions
from grailnode.config import Config
from grailnode.engine.policy import Policy, PolicyError
from grailnode.node.http_server import Answer, Request, serve_http
from grailnode.node.node_makers import make_auditor
from grailnode.node.supervisor import run_until_interrupted
from grailnode.observe.node_logs import with_local_knowledge
from grailnode.observe.observer import RECENT_WINDOWS, Observer
from grailnode.observe.rollout_reader import PublishedRollout, ReadingLimits, read_rollouts
from grailnode.observe.state import NetworkState
from grailnode.run.creation import fetch_model
from grailnode.run.joining import open_config_to_read
from grailnode.ui.report import templates
from grailnode.ui.report.dashboard_sections import Choice, dashboard_page, rollout_list, sections_of
from grailnode.ui.report.templates import asset, asset_urls
from protocol.errors import ProtocolError
from roles.node.identity import Node
from roles.ports import StoreError

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_KEPT_HEADERS: Final = {**_HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
_HTML: Final = "text/html; charset=utf-8"
_ASSET_TYPES: Final = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


@dataclass(frozen=True)
class View:
    """What was read of a run: its state, and the rollouts of its newest judged window."""

    state: NetworkState
    rollouts: tuple[PublishedRollout, ...] = ()


@dataclass(eq=False)
class Dashboard:
    """The pages of one run."""

    run_name: str
    read: Callable[[], Awaitable[View]]  # says in the state what it could not read
    pace: float  # seconds from one reading to the next
    now: Callable[[], float]  # returns the seconds since the Unix epoch
    _revision: int = field(default=0, init=False)
    _sections: dict[str, tuple[int, str]] = field(default_factory=dict, init=False)
    _rollouts: tuple[PublishedRollout, ...] = field(default=(), init=False)
    _rollout_revision: int = field(default=0, init=False)
    _names: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        templates.load()
        asset_urls()  # later this process may have no free file descriptor

    async def keep_new(self) -> None:
        while True:
            view = await self.read()
            sections = await trio.to_thread.run_sync(sections_of, view.state)
            self._names = {miner.key: miner.name for miner in view.state.miners}
            self.show(view.rollouts, sections)
            await trio.sleep(self.pace)

    def show(self, rollouts: tuple[PublishedRollout, ...], sections: Mapping[str, str] | None = None) -> None:
        """Show other rollouts, and sections where they are others."""
        self._revision = max(self._revision + 1, int(1000 * self.now()))  # grows over restarts, too
        for name, html in (sections or {}).items():
            if self._sections.get(name, (0, ""))[1] != html:
                self._sections[name] = self._revision, html
        if rollouts != self._rollouts:
            self._rollouts, self._rollout_revision = rollouts, self._revision

    def respond(self, request: Request) -> Answer:
        """Answer a request: the page, its files, the rollouts of a choice, or the news."""
        packed = "gzip" in request.headers.get("accept-encoding", "")
        if request.path == "/":
            sections = {name: html for name, (_, html) in self._sections.items()}
            choice = Choice.of(request.query)
            revisions = self._revision, self._rollout_revision
            page = dashboard_page(self.run_name, sections, self._list(choice), choice, *revisions)
            return _text(page, _HTML, packed)
        if request.path == "/rollouts":
            return _text(self._list(Choice.of(request.query)), _HTML, packed)
        if name := asset_urls().get(f"{request.path[1:]}?{request.query}"):
            return _text(asset(name), _ASSET_TYPES[name.rpartition(".")[2]], packed, _KEPT_HEADERS)
        if request.path == "/news":
            since = request.query.removeprefix("since=")
            number = int(since) if since.isascii() and since.isdigit() and len(since) < 16 else 0
            return _text(self._news(number), "application/json", packed)
        return Answer(b"there is no such page\n", status="404 Not Found", headers=_HEADERS)

    def _list(self, choice: Choice) -> str:
        return rollout_list(self._rollouts, self._names, choice)

    def _news(self, since: int) -> str:
        """Return what changed after a revision; within a second, viewers that lack the same share the same text."""
        sections = {name: html for name, (revision, html) in self._sections.items() if revision > since}
        numbers = {"now": round(self.now()), "revision": self._revision, "rollouts": self._rollout_revision}
        return json.dumps({**numbers, "sections": sections})


def _text(words: str, content_type: str, packed: bool, headers: Mapping[str, str] = _HEADERS) -> Answer:
    if not packed:
        return Answer(words.encode(), content_type, headers=headers)
    return Answer(_compressed(words), content_type, headers={**headers, "Content-Encoding": "gzip"})


@lru_cache(maxsize=16)
def _compressed(words: str) -> bytes:
    return gzip.compress(words.encode(), 5, mtime=0)


_POLLS_PER_WINDOW: Final = 40
_FASTEST_SECONDS: Final = 1.0
_SLOWEST_SECONDS: Final = 30.0
_WINDOWS_BACK: Final = 100  # older windows at each reading, for their curves
_VIEWERS: Final = 500  # connections at a time
_SEND_SECONDS: Final = 30.0
_LIMITS: Final = ReadingLimits(rollouts=400, characters=8_000_000, seconds=10.0)


def dashboard(host: str, port: int, local: bool, **run_options: Unpack[RunOptions]) -> None:
    if local and not _is_loopback(host):
        raise click.UsageError(f"--local with --host {host}: logs are for this machine's owner, at a loopback address")
    config = open_config_to_read(**run_options)
    if not _is_loopback(host):
        click.echo(f"{host}: whoever reaches port {port} of this machine sees the page", err=True)
    run_until_interrupted(partial(_serve, config if local else None, make_auditor(config), host, port))
    raise click.exceptions.Abort


def _for_host(host: str, respond: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
    """Return what answers requests to this host alone, where it is a loopback address: a page of another site may let
    its own name lead here (DNS rebinding).
    """

    def answer(request: Request) -> Answer:
        with suppress(ValueError):
            name = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
            if not _is_loopback(host) or name == host.lower() or _is_loopback(name):
                return respond(request)
        return Answer(b"the Host header names another machine\n", status="421 Misdirected Request")

    return answer


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _serve(config: Config | None, node: Node, host: str, port: int) -> None:
    period = node.run.schedule.rounds * node.run.beacon.period_ms / 1000
    pace = min(max(period / _POLLS_PER_WINDOW, _FASTEST_SECONDS), _SLOWEST_SECONDS)
    with tempfile.TemporaryDirectory(prefix="grailnode-dashboard-") as directory:
        reader = RunReader(node, Path(directory), config)
        page = Dashboard(node.run.name, reader.read, pace, node.clock.now)
        serve = partial(serve_http, connections=_VIEWERS, send_seconds=_SEND_SECONDS)
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(serve, host, port, _for_host(host, page.respond))
            except OSError as error:
                raise UserError(f"--host {host} --port {port}: cannot be used ({error.strerror or error})") from error
            click.echo(f"http://{f'[{host}]' if ':' in host else host}:{port}/", err=True)
            nursery.start_soon(reader.keep_rollouts, page.show)
            await page.keep_new()


class RunReader:
    """Reads the state of a run, and the rollouts of its newest judged window, for which it needs the tokenizer in the
    directory of the run's model files.

    The config's logs say for what this machine's nodes wait; it is left out where others may see the page.
    """

    def __init__(self, node: Node, directory: Path, config: Config | None = None) -> None:
        self._node = node
        self._config = config
        self._directory = directory
        self._observer = Observer(node, max(0, node.window() - RECENT_WINDOWS))
        self._policy: Policy | None = None
        self._rollouts: tuple[PublishedRollout, ...] = ()
        self._read_window: tuple[int, frozenset[str]] = (-1, frozenset())  # and the validators that had revealed it
        self._state: NetworkState | None = None
        self._state_is_new = trio.Event()

    async def read(self) -> View:
        """Read the state as far as it is new, and return it with the newest rollouts that `keep_rollouts` has read."""
        await self._observer.follow()
        await self._observer.read_back(_WINDOWS_BACK)
        self._state = self._observer.state()
        if self._config is not None:
            self._state = await trio.to_thread.run_sync(with_local_knowledge, self._config, self._node, self._state)
        self._state_is_new.set()
        return View(self._state, self._rollouts)

    async def keep_rollouts(self, show: Callable[[tuple[PublishedRollout, ...]], object]) -> None:
        """Read rollouts again and again, behind the state; what cannot be read now stays as it was."""
        while True:
            await self._state_is_new.wait()
            self._state_is_new = trio.Event()
            with suppress(StoreError, ProtocolError, PolicyError, OSError):  # the state says what storage does not show
                before = self._rollouts
                await self._read_rollouts()
                if self._rollouts != before:
                    show(self._rollouts)

    async def _read_rollouts(self) -> None:
        """Read rollouts of the newest window with a summary, miners with rejected groups first.

        They are read again when another validator has revealed its verdicts, and while some could not be read.
        """
        if self._state is None or not self._state.windows:
            return
        state, window = self._state, self._state.windows[-1].window
        revealed = frozenset(row.key for row in state.validators if any(item.window == window for item in row.recent))
        if (window, revealed) == self._read_window:
            return
        if self._policy is None:
            self._policy = await fetch_model(self._node, self._directory)
        in_window = {key: item for key, cells in state.recent.items() for item in cells if item.window == window}
        miners = [bytes.fromhex(key) for key in sorted(in_window, key=lambda key: -in_window[key].rejected)]
        read = await read_rollouts(self._node, self._policy.tokenizer, window, miners, _LIMITS)
        if not read.unread:
            self._read_window = window, revealed
        if read.rollouts or not read.unread:
            self._rollouts = read.rollouts[: int(_LIMITS.rollouts)]
