"""How fast the dashboard of a large run appears, and what it costs to keep: `python -m bench.dashboard`.

It serves an invented run of 10,000 windows and 200 miners. Each reading finds one more window. Chromium, where there is
one, measures the first paint.
"""

import argparse
import json
import resource
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import trio

from grailnode.cli.actions.run_dashboard import Dashboard, View
from grailnode.node.http_server import serve_http
from tests.support.builders.observed_runs import NOW, observed_run
from tests.support.measuring.memory import resident

CHROMIUM: Final = Path("/usr/bin/chromium")
PORT: Final = 8649


class GrowingRun:
    """A run that has one more window at each reading; the oldest window is forgotten, as an observer does."""

    def __init__(self, windows: int, miners: int) -> None:
        self._whole = observed_run(2 * windows, miners)
        self._windows = windows
        self.readings = 0

    def now(self) -> float:
        return NOW + self.readings

    async def read(self) -> View:
        self.readings += 1
        rows = self._whole.state.windows[self.readings : self.readings + self._windows]
        return View(replace(self._whole.state, windows=rows, read_at=self.now()), self._whole.rollouts)


async def measure(windows: int, miners: int, readings: int, viewers: int) -> dict[str, Any]:
    """Return the figures of a run of some size, with some viewers, over some readings."""
    run = GrowingRun(windows, miners)
    page = Dashboard("bench", run.read, 0.0, run.now)
    address = f"http://127.0.0.1:{PORT}/"
    figures: dict[str, Any] = {"windows": windows, "miners": miners, "viewers": viewers}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(serve_http, connections=500), "127.0.0.1", PORT, page.respond)
        nursery.start_soon(page.keep_new)
        await _until(run, 3)
        async with httpx.AsyncClient() as client:
            answer = await client.get(address)
            figures["page_bytes"], figures["sent_bytes"] = len(answer.content), answer.num_bytes_downloaded
        for _ in range(viewers):
            nursery.start_soon(_view, address)
        await _until(run, 3 + readings // 4)  # the largest buffers exist
        before, started, first = resident("VmRSS"), time.perf_counter(), run.readings
        await _until(run, 3 + readings)
        figures["ms_per_reading"] = round(1000 * (time.perf_counter() - started) / (run.readings - first), 1)
        figures["grown_bytes"] = resident("VmRSS") - before
        figures["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if CHROMIUM.exists():
            page.pace = 1.5
            figures["first_paint_ms"] = await trio.to_thread.run_sync(_first_paints, address)
        nursery.cancel_scope.cancel()
    return figures


async def _until(run: GrowingRun, readings: int) -> None:
    while run.readings < readings:
        await trio.sleep(0.02)


async def _view(address: str) -> None:
    revision = 0
    async with httpx.AsyncClient(timeout=None) as client:
        while True:
            revision = (await client.get(f"{address}news?since={revision}")).json()["revision"]
            await trio.sleep(2.0)


def _first_paints(address: str) -> list[int]:
    """Return milliseconds from the navigation to the first contentful paint, of five loads with empty caches."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    paints = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for _ in range(5):
            page = browser.new_context().new_page()
            page.goto(address)
            entries = "performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)[0]"
            while page.evaluate(entries) is None:
                page.wait_for_timeout(20)
            paints.append(round(page.evaluate(entries)))
        browser.close()
    return paints


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--miners", type=int, default=200)
    parser.add_argument("--readings", type=int, default=200)
    parser.add_argument("--viewers", type=int, default=20)
    options = parser.parse_args()
    print(json.dumps(trio.run(measure, options.windows, options.miners, options.readings, options.viewers)))
