"""`grailnode mirror`: keep a read-only copy of the trainers' public objects."""

import sys
from functools import partial
from typing import Final, Unpack

import click
import trio

from grailnode.cli.options import RunOptions
from grailnode.config import Config
from grailnode.node.node_makers import make_auditor
from grailnode.node.stores import Storage
from grailnode.node.supervisor import run_until_interrupted
from grailnode.node.telemetry import NodeTelemetry
from grailnode.run.joining import open_config_to_read
from roles.authority_updates import run_under_authority
from roles.policy.mirroring import Mirror

_POLL_SECONDS: Final = 0.5


def mirror(to: str, region: str, **run_options: Unpack[RunOptions]) -> None:
    """Run `grailnode mirror`."""
    run_until_interrupted(partial(_mirror, open_config_to_read(**run_options), to, region))
    raise click.exceptions.Abort


async def _mirror(config: Config, to: str, region: str) -> None:
    telemetry = NodeTelemetry("mirror", terminal=sys.stderr)
    node = await trio.to_thread.run_sync(partial(make_auditor, config, telemetry))
    copy = Mirror(node, Storage(config, telemetry).copy_target(to, region))
    await run_under_authority(node, partial(copy.keep, _POLL_SECONDS))
