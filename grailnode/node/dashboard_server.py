"""The dashboard of a run over HTTP: one task reads the run, and every viewer gets what that task has read.

A viewer's page keeps itself new: it asks every two seconds for the sections that changed since the revision that it
has, and for the time of this machine.
"""

import gzip
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import trio

from grailnode.node.http_server import Answer, Request
from grailnode.observe.rollout_reader import PublishedRollout
from grailnode.observe.state import NetworkState
from grailnode.ui.report import templates
from grailnode.ui.report.dashboard_sections import Choice, dashboard, rollout_list, sections_of
from grailnode.ui.report.templates import asset, asset_urls

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
            page = dashboard(self.run_name, sections, self._list(choice), choice, *revisions)
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
