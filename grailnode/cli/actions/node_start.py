"""`grailnode --role trainer`, `--role miner` and `--role validator`: run a node until Ctrl-C."""

import time
from typing import Final, Unpack

from grailnode import UserError
from grailnode.cli.options import RunOptions, check_name, report_line
from grailnode.config import Config
from grailnode.node.role_checks import Role, check_start
from grailnode.node.role_processes import run_role
from grailnode.node.user_errors import with_repair_command
from grailnode.run.joining import open_config
from roles.node.retries import WAIT_REPORT_SECONDS
from roles.ports import NotFoundError, StateError

_POLL_SECONDS: Final = 5.0
_TRIES_PER_REPORT: Final = round(WAIT_REPORT_SECONDS / _POLL_SECONDS)


def run_node(role: Role, name: str | None, **run_options: Unpack[RunOptions]) -> None:
    """Run a node until Ctrl-C."""
    config = wait_for_run(**run_options)
    name = name or (f"{role}-1" if role in ("miner", "worker") else role)
    check_name(name)
    try:
        check_start(config, role, name, report_line)
    except StateError as error:
        raise UserError(with_repair_command(str(error), config, name)) from error
    run_role(config, role, name, report_line)


def wait_for_run(**run_options: Unpack[RunOptions]) -> Config:
    """Return the run's configuration, as soon as its founder has published the run."""
    since, tries = time.strftime("%H:%M"), 0
    while True:
        try:
            return open_config(**run_options)
        except NotFoundError as error:
            if tries % _TRIES_PER_REPORT == 0:
                report_line(f"{error}; waiting since {since} (Ctrl-C ends this)")
        tries += 1
        time.sleep(_POLL_SECONDS)
