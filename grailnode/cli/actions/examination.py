"""What `grailnode doctor` does."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

import click
import platformdirs

from grailnode.cli.options import check_name, report_line, usual_name
from grailnode.node.doctor_checks import examine, machine_checks, node_checks
from grailnode.node.process_launch import Role
from grailnode.run import key_files
from grailnode.run.joining import open_config
from grailnode.run.run_option import is_url

_MARKS: Final = {"ok": "ok  ", "warning": "warn", "failed": "FAIL", "skipped": "-   "}
_ROLES: Final[Sequence[Role]] = ("trainer", "validator", "miner", "worker")


def doctor(
    run: str | None,
    role: Role | None,
    name: str | None,
    overrides: tuple[str, ...],
    trust: Callable[[str], None] | None,
    as_json: bool,
) -> None:
    """Print a line for each check; exit with 1 if one fails."""
    checks = machine_checks()
    if run is not None:
        if is_url(run):  # a stranger has no files of the run yet, and a look leaves none where it was taken
            cache = platformdirs.user_cache_path("grailnode")
            places = {"state": cache, "cache": cache / "objects", "keys": cache / "doctor"}
            overrides = (*(f"node.{key}={path}" for key, path in places.items()), *overrides)
        config = open_config(run, overrides, trust=trust)
        # the first role whose usual name has a key on this machine; a newcomer is a miner
        keys = {path.stem for path in key_files.list_key_files(config.at(config.node.keys))}
        likely: Role = next((role for role in _ROLES if usual_name(role) in keys), "miner")
        role = role or likely
        name = name or usual_name(role)
        check_name(name)
        checks = node_checks(config, role, name, report_line)
    failures = 0
    for finding in examine(checks):
        line = f"{_MARKS[finding.outcome]} {finding.check + ':':17} {finding.line}"
        click.echo(json.dumps(asdict(finding)) if as_json else line)
        failures += finding.outcome == "failed"
    if failures:
        raise SystemExit(1)
