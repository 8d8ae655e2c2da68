"""Pictures of what people see of a run: the terminal's live view, the report and the dashboard.

    python -m bench.screenshots OUT [--demo DIR]

DIR is what `grailnode demo --keep --out DIR` has left; without it the demo runs first. Debian's Chromium takes the
pictures of the pages. Nothing is drawn for the pictures alone.
"""

import argparse
import io
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import httpx
import trio
from rich.console import Console

from bench.dashboard import CHROMIUM
from grailnode.node.node_makers import make_auditor
from grailnode.observe.observer import Observer, OperatorKnowledge
from grailnode.observe.state import NetworkState
from grailnode.run import key_files
from grailnode.run.joining import open_config_to_read
from grailnode.ui.report_data import DemoReport
from grailnode.ui.terminal.pages import run_page
from protocol.identity.signing import SigningKey

_COLUMNS, _LINES = 104, 34  # of the terminal
_WIDTH, _HEIGHT = 1100, 820  # of the browser's window
_PATIENCE_SECONDS: Final = 60.0


async def read_state(run: Path, report: DemoReport) -> NetworkState:
    """Return the state of a kept demo in its last window, as its operator saw it."""
    node = make_auditor(open_config_to_read(str(run)))
    names = {SigningKey(key_files.read(file)).public: file.stem for file in (run.parent / "keys").glob("*.key")}
    kinds = {bytes.fromhex(miner.key): miner.kind for miner in report.state.miners}
    windows = len(report.state.windows)
    observer = Observer(node, 0, OperatorKnowledge(names, kinds, windows), last_window=windows - 1)
    await observer.refresh()
    state = observer.state()
    return replace(
        state,
        full_bytes=report.state.full_bytes,
        seconds=windows * state.window_seconds,
        window=windows - 1,
        window_elapsed=state.window_seconds,
        alarms=(),
        silent=(),
    )


def draw_terminal(state: NetworkState, file: Path) -> None:
    """Write the live view as a drawing that asks no server for a font."""
    console = Console(record=True, width=_COLUMNS, height=_LINES, file=io.StringIO(), force_terminal=True)
    console.print(run_page(state.run_name, state, is_live=True))
    drawing = console.export_svg(title="grailnode demo")
    file.write_text(re.sub(r"@font-face \{.*?\}", "", drawing, flags=re.DOTALL), encoding="utf-8")


def photograph(pages: dict[Path, str]) -> None:
    """Open each address in a browser, and write what it shows first."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for file, address in pages.items():
            page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme="light")
            page.goto(address)
            page.wait_for_timeout(1000)  # the page's script writes ages
            page.screenshot(path=file)
        browser.close()


def main() -> None:
    """Write terminal.svg, report.png and dashboard.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--demo", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        demo = options.demo or Path(directory) / "demo"
        if options.demo is None:
            subprocess.run([sys.executable, "-m", "grailnode", "demo", "--keep", "--out", demo], check=True)
        report = DemoReport.model_validate_json((demo / "report.json").read_bytes())
        run = demo.absolute() / "network" / "run.toml"
        draw_terminal(trio.run(read_state, run, report), options.out / "terminal.svg")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        address = f"http://127.0.0.1:{port}/"
        arguments = ["dashboard", "--run", str(run), "--port", str(port)]
        server = subprocess.Popen([sys.executable, "-m", "grailnode", *arguments], stderr=subprocess.DEVNULL)
        try:
            _wait_for_rollouts(address)
            photograph(
                {
                    options.out / "report.png": (demo / "report.html").absolute().as_uri(),
                    options.out / "dashboard.png": address,
                }
            )
        finally:
            server.terminate()
            server.wait()


def _wait_for_rollouts(address: str) -> None:
    """Wait until the page lists rollouts, which are read last."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end:
        try:
            if 'class="rollout"' in httpx.get(address).text:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{address}: no rollouts within {_PATIENCE_SECONDS:g} s")


if __name__ == "__main__":
    main()
