"""`pytest --allowed-skips FILE`: a skip for any reason but the lines of FILE fails the run."""

from pathlib import Path

import pytest


class SkipGuard:
    """Fails a run in which a test was skipped for a reason that is not allowed.

    Attributes:
        unexpected: the place and the reason of each such skip.
    """

    def __init__(self, allowed_reasons: set[str]) -> None:
        self.unexpected: list[str] = []
        self._allowed_reasons = allowed_reasons

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._check(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._check(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.unexpected:
            terminalreporter.write_line(f"SKIPPED for a reason that --allowed-skips does not list: {line}", red=True)

    def _check(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if reason not in self._allowed_reasons:
                self.unexpected.append(f"{report.nodeid}: {reason}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allowed-skips", type=Path, metavar="FILE", help="Fail on a skip whose reason is not a line of FILE."
    )


def pytest_configure(config: pytest.Config) -> None:
    file: Path | None = config.getoption("--allowed-skips")
    if file is not None and not hasattr(config, "workerinput"):  # the reports of workers come to the main process
        config.pluginmanager.register(SkipGuard(set(file.read_text().splitlines())))
