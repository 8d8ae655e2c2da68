"""What `grailnode keys` and `grailnode admit` share: they open a run's authority, and sign and publish drafts."""

import click
import trio

from grailnode.config import Config
from grailnode.node.node_makers import make_root_publisher
from grailnode.run import authority_drafts
from grailnode.run.authority_drafts import Draft
from grailnode.run.files import write_whole
from grailnode.run.joining import open_config
from roles.authority_updates import refresh_authority
from roles.node.identity import Node


def open_authority(run: str) -> tuple[Config, Node]:
    """Return a run's configuration, and a node that knows who may act in the run as its store says now."""
    config = open_config(run)
    node = make_root_publisher(config)
    trio.run(refresh_authority, node)
    return config, node


def submit(config: Config, node: Node, draft: Draft) -> None:
    """Sign a draft with the root keys at hand; publish it if they are enough, else print what to do with its file."""
    draft = authority_drafts.sign_with_key_files(draft, config.at(config.node.keys), node.authority)
    print_revision(draft)
    shortfall = authority_drafts.missing_signatures(draft, node.revisions)
    if not shortfall:
        publish(node, draft)
        return
    path = config.directory / f"revision-{draft.revision.number}.draft"
    write_whole(path, draft.to_bytes())
    click.echo(f"{path}: {shortfall}. Take it to each root key: grailnode keys sign {path.name} KEYFILE")
    click.echo(f"then: grailnode keys publish {path.name} --run RUN")


def print_revision(draft: Draft) -> None:
    for line in authority_drafts.describe(draft.revision):
        click.echo(line)


def publish(node: Node, draft: Draft) -> None:
    """Publish a draft, and print its number."""
    number = authority_drafts.publish(node, draft)
    click.echo(f"revision {number} is published; every node obeys it at its next poll")
