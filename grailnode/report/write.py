"""report.json and report.html on disk, each whole or not at all."""

import os
import tempfile
from pathlib import Path

from grailnode.report.model import Report
from grailnode.report.page import page

JSON_NAME = "report.json"
HTML_NAME = "report.html"


def write_report(report: Report, directory: Path) -> tuple[Path, Path]:
    """Write report.json and report.html into `directory` (made where missing), replacing older ones.

    Returns:
        the two paths, JSON first.

    Raises:
        OSError: one of them could not be written; a file of an earlier report is then still whole.
    """
    directory.mkdir(parents=True, exist_ok=True)
    as_json, as_html = directory / JSON_NAME, directory / HTML_NAME
    _replace(as_json, report.model_dump_json(indent=2) + "\n")
    _replace(as_html, page(report))
    return as_json, as_html


def read_report(file: Path) -> Report:
    """Read a report.json.

    Raises:
        OSError: it cannot be read.
        pydantic.ValidationError: it is not a report; names the key.
    """
    return Report.model_validate_json(file.read_bytes())


def _replace(file: Path, content: str) -> None:
    """Write beside the file, then rename over it: a reader sees the old one or the new one."""
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    beside = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        beside.chmod(0o644)  # mkstemp's 0600 would keep a web server from showing it
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
