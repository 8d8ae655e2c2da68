"""The record of a finished run that people keep: report.json for programs, report.html for people."""

from pathlib import Path

from grailnode.run.files import write_whole
from grailnode.ui.report.page import page
from grailnode.ui.report_data import DemoReport

__all__ = ["DemoReport", "write_report"]


def write_report(report: DemoReport, directory: Path) -> tuple[Path, Path]:
    """Write report.json and report.html into `directory` (created if missing), each completely or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    as_json, as_html = directory / "report.json", directory / "report.html"
    write_whole(as_json, f"{report.model_dump_json(indent=2)}\n".encode())
    write_whole(as_html, page(report).encode())
    return as_json, as_html
