"""`grailnode --role trainer`, `--role miner` and `--role validator`: run a node until Ctrl-C."""

import time
from dataclasses import dataclass
from typing import Any, Final

from grailnode.cli.actions.open_run import RunOptions, report_line
from grailnode.cli.options import check_name
from grailnode.config import Config
from grailnode.node.role_processes import Role, check_start, run_role
from roles.ports import NotFoundError

_POLL_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Options(RunOptions):
    """The options of a node; the default of its name depends on its role."""

    role: Role
    name: str | None


def run_node(**parameters: Any) -> None:
    """Run a node until Ctrl-C."""
    options = Options(**parameters)
    config = wait_for_run(options)
    name = options.name or (f"{options.role}-1" if options.role in ("miner", "worker") else options.role)
    check_name(name)
    check_start(config, options.role, name, report_line)
    run_role(config, options.role, name, report_line)


def wait_for_run(options: Options) -> Config:
    """Return the run's configuration, as soon as its founder has published the run."""
    is_reported = False
    while True:
        try:
            return options.open_config()
        except NotFoundError as error:
            if not is_reported:
                report_line(f"{error}: waiting until the founder's trainer publishes the run (Ctrl-C ends this)")
                is_reported = True
        time.sleep(_POLL_SECONDS)
