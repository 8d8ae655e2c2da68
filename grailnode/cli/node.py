"""`grailnode --role trainer`, `--role miner` and `--role validator`: run a node until Ctrl-C."""

from dataclasses import dataclass

from grailnode.cli.options import RunOptions, check_name, report_line
from grailnode.node.role_processes import Role, check_start, run_role


@dataclass(frozen=True)
class Options(RunOptions):
    """The options of a node; the default of its name depends on its role."""

    role: Role
    name: str | None


def run_node(options: Options) -> None:
    """Run a node until Ctrl-C."""
    config = options.open_config()
    name = options.name or ("miner-1" if options.role == "miner" else options.role)
    check_name(name)
    check_start(config, options.role, name, report_line)
    run_role(config, options.role, name, report_line)
