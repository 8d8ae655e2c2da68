"""`grailnode backup`, `restore` and `repair`: what an operator does with the state of a stopped node
(docs/guide/operate.md).

A backup has a directory for each state (the node's, and its canary's), which is a state itself.

A repair rebuilds what a state has lost, from storage and from what is left: in memory first. If a part cannot be
rebuilt, nothing is written.
"""

import re
import shutil
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import trio

from grailnode import UserError
from grailnode.config import Config
from grailnode.node.node_makers import (
    canary_state_name,
    make_canary,
    make_node,
    make_other_host,
    run_id_of,
    state_directory,
)
from grailnode.node.state_locks import lock_whole_state
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.user_errors import with_repair_command
from grailnode.run import key_files
from grailnode.store.disk import sync_folder
from grailnode.store.state.draft import StateDraft
from grailnode.store.state.state_store import REMAKEABLE, StateStore
from protocol import paths
from protocol.errors import ChainError
from protocol.rollout.batch import Commitment
from roles.authority_updates import AUTHORITY, refresh_authority
from roles.node.identity import Node
from roles.policy.follower import TRUST_PATH, Follower
from roles.ports import LineReporter, RepairError, StateError
from roles.records import FOREIGN, fetch_record
from roles.trainer.collect.acceptance import repair_collector
from roles.trainer.learn.checkpoint_files import CHECKPOINTS, NOTES, repair_checkpoint, whole_checkpoint
from roles.trainer.outer.round_repair import repair_rounds, repair_site
from roles.trainer.publish.chain_repair import LAST_CHANGES, ChainRepair, repair_rewind
from roles.trainer.spool import WEIGHTS
from roles.validator.ledger_repair import LedgerRepair
from roles.validator.ledger_state import Ledger

_OBJECTS: Final = "objects"
_canary_name: Final = re.compile(r".+-canary-\d+")


def back_up(config: Config, name: str, directory: Path, say: LineReporter) -> None:
    """Copy the states of a stopped node into a new directory; UserError if one is damaged, or it is not empty."""
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory}: is not empty; name a new directory for each backup")
    with lock_whole_state(state_directory(config, name)):
        for state_name in _state_names(config, name):
            source = state_directory(config, state_name) / _OBJECTS
            if source.is_dir():
                trio.run(_copy_state, source, directory / state_name / _OBJECTS, run_id_of(config), say)
            elif state_name == name:
                raise UserError(f"{source}: no such state; is --name the name of the node?")


def restore(config: Config, name: str, directory: Path, say: LineReporter) -> None:
    """Copy states back from a backup, which is checked first; UserError if it is not whole, or there is a state."""
    if not (directory / name / _OBJECTS).is_dir():
        raise UserError(f"{directory}: has no state of {name}")
    names = [state_name for state_name in _state_names(config, name) if (directory / state_name).is_dir()]
    with lock_whole_state(state_directory(config, name)):
        targets = {state_name: state_directory(config, state_name) / _OBJECTS for state_name in names}
        for target in targets.values():
            if target.exists() and any(not path.name.startswith(".") for path in target.iterdir()):
                raise UserError(f"{target}: there is a state already; move it away first")
        for state_name, target in targets.items():
            trio.run(_copy_state, directory / state_name / _OBJECTS, target, run_id_of(config), say)
    line = "If the node has published more since the backup, it says so at its start: then run `grailnode repair`."
    say(with_repair_command(line, config, name))


def node_names(states: Path) -> list[str]:
    """Return the names of the nodes that have a state in a folder; a canary's belongs to that of its trainer."""
    names = [objects.parent.name for objects in states.glob(f"*/{_OBJECTS}")]
    return sorted(name for name in names if not _canary_name.fullmatch(name))


def _state_names(config: Config, name: str) -> tuple[str, ...]:
    return (name, canary_state_name(config, name)) if config.trainer.canaries else (name,)


async def _copy_state(source: Path, target: Path, run_id: bytes, say: LineReporter) -> None:
    """Copy a state, each object of which is checked, to a directory that has no object yet. It appears when it is
    whole.
    """
    partial, size = target.with_name(f"{_OBJECTS}.partial"), 0
    shutil.rmtree(partial, ignore_errors=True)  # of a copy that was interrupted
    try:
        original, copy = StateStore(source, run_id), StateStore(partial, run_id)
        paths = [info.path async for info in original.list("")]
        if not paths:
            raise UserError(f"{source}: has no object to copy")
        for path in paths:
            data = await original.get(path, sys.maxsize)
            await copy.put(path, data)
            size += len(data)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync_folder(target.parent)
    except StateError as error:
        raise UserError(f"{error.place}: {error.what}; only a whole state is copied") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            target.parent.rmdir()  # if it is empty: the next backup needs a new directory
    say(f"{target}: {len(paths)} objects, {size} bytes")


_NAMED: Final = 4  # paths in the last line


def repair_node(config: Config, name: str, say: LineReporter) -> None:
    """Rebuild the state of a stopped node, and that of its canary; UserError if no node has this name."""
    state, key = state_directory(config, name), config.at(config.node.keys) / f"{name}{key_files.SUFFIX}"
    own = state if config.trainer.host else key  # another host of a trainer has no key
    if not own.exists():  # else a key and a state would be made, and the state be whole
        raise UserError(f"{own}: not there; is --name the name of the node?")
    with lock_whole_state(state):
        if config.trainer.host:
            trio.run(repair_other_host, make_other_host(config, name), say)
            return
        node, hosts = make_node(config, name, NodeTelemetry(name), repairing=True), config.trainer.hosts
        trio.run(partial(repair_state, node, say, hosts=hosts.count if hosts else 1))
        if config.trainer.canaries and state_directory(config, canary_state_name(config, name)).is_dir():
            trio.run(repair_state, make_canary(config, name, NodeTelemetry(name), repairing=True), say)


async def repair_other_host(node: Node, say: LineReporter) -> None:
    """Forget what the state of a host of a trainer other than host 0 has lost; say what to do on host 0."""
    draft = node.state
    assert isinstance(draft, StateDraft)
    damages = await draft.scan()
    for path, what in damages.items():
        say(f"{path}: {what}")
    await draft.commit()
    if any(path.startswith(CHECKPOINTS) for path in damages):
        say(f"{CHECKPOINTS}: lost; remove {NOTES} from the state of host 0, and run `grailnode repair` there")
    elif damages:
        say(f"{WEIGHTS}: start this host again; if host 0 needs what is lost, its next line says so")
    else:
        say("the state of this host is whole")


async def repair_state(node: Node, say: LineReporter, hosts: int = 1) -> None:
    """Rebuild what the state of a node has lost: its state is a draft, which is written at the end. Of a trainer on
    several hosts, it is the state of host 0.
    """
    draft = node.state
    assert isinstance(draft, StateDraft)
    damages = await draft.scan()
    last_changes: tuple[str, ...] = ()
    for path, what in damages.items():
        say(f"{path}: {what}")
    await _repair_authority(node, set(damages), say)
    if node.key.public in node.authority.trainers:
        is_shared = hosts > 1 and await whole_checkpoint(draft) is not None
        chain = ChainRepair(node, damages.keys(), say, is_shared=is_shared)
        is_rewound = not damages and await repair_rewind(node, say)
        chain_is_rebuilt = await chain.is_needed()
        if chain_is_rebuilt:
            await chain.run()
        if not await repair_rounds(node, damages.keys(), say, is_rewound=is_rewound):
            # Weights of which other hosts have files cannot be read here; they are never newer than this state.
            is_older = chain_is_rebuilt and not chain.is_shared
            await repair_checkpoint(draft, say, chain_is_rebuilt=is_older, is_rewound=is_rewound)
        await repair_collector(draft, damages.keys(), say)
        if is_rewound and not chain_is_rebuilt:
            last_changes = LAST_CHANGES
    elif node.key.public in node.authority.workers:
        await repair_site(node, damages.keys(), say)
        await repair_collector(draft, damages.keys(), say)
    elif node.key.public in node.authority.validators:
        await LedgerRepair(node, damages.keys(), say).run()
    if TRUST_PATH in damages:
        say(await _repair_trust(node, *await _newest_use(node)))
    for path in damages:
        if path.startswith(REMAKEABLE):
            say(f"{path}: is made again")
    written = draft.changed_paths()
    await draft.commit(last_changes)
    say(f"{node.name}: its state is whole{_summary(written)}")


def _summary(written: list[str]) -> str:
    """Say which objects a repair has written; nothing if the state was whole before."""
    if not written:
        return ""
    more = f", and {len(written) - _NAMED} more" if len(written) > _NAMED else ""
    count = f"{len(written)} objects" if len(written) > 1 else "1 object"
    return f" now; {count} came from storage or what is left: {', '.join(written[:_NAMED])}{more}"


async def _repair_authority(node: Node, lost_paths: set[str], say: LineReporter) -> None:
    """Fetch the revisions of the authority again, from the first that is lost."""
    revisions = sorted(path for path in lost_paths if path.startswith(AUTHORITY))
    if revisions:
        own_paths = sorted([*revisions, *[item.path async for item in node.state.list(AUTHORITY)]])
        for path in own_paths[own_paths.index(revisions[0]) :]:
            await node.state.delete(path)
    await refresh_authority(node)
    if revisions:
        newest = int(own_paths[-1].removeprefix(AUTHORITY))
        if node.revisions.number < newest:
            raise RepairError(
                f"{own_paths[-1]}: storage shows revision {node.revisions.number} only, and a node must not go back; "
                "try again when the meeting point answers"
            )
        say(f"{revisions[0]}: fetched again, up to revision {node.revisions.number}")


async def _newest_use(node: Node) -> tuple[int, bytes | None]:
    """Return the newest version that a node is known to have used, and the digest of its weights if that is known.

    A validator's ledger names it, and so does a miner's newest commitment in its own space; -1 for a new node.
    """
    last = (await Ledger.open(node.state, node.run)).last
    if last is not None:
        return last.version, last.weights
    commitments = [item.path async for item in node.store.list(paths.kind_prefix(node.key.public, "commitments"))]
    for path in reversed(commitments):
        try:
            return (await fetch_record(node, Commitment, path)).record.version, None
        except FOREIGN:
            continue  # of another run, or bytes of somebody else
    return -1, None


async def _repair_trust(node: Node, used_version: int, used_weights: bytes | None = None) -> str:
    """Rebuild the trust of a node that follows a chain, from the trainer's signed head; return a line about it.

    The trust is never behind what the node has used.
    """
    follower = await Follower(node).open()
    await follower.refresh()
    trust = follower.chain.trust
    if trust is None or trust.version < used_version:
        version = trust.version if trust is not None else -1
        raise RepairError(
            f"{TRUST_PATH}: storage shows version {version}, but this node has used version {used_version}; trust must "
            "not go back, so try again when the trainer's storage is up to date"
        )
    if used_weights is not None:
        try:
            manifest = follower.chain.manifest(used_version)
        except ChainError:
            pass  # it is older than what the head lists
        else:
            if manifest.weights != used_weights:
                raise RepairError(f"{TRUST_PATH}: storage shows another chain than the one that this node has used")
    basis = f"at least version {used_version}, which this node has used" if used_version >= 0 else "as a new node does"
    return f"{TRUST_PATH}: version {trust.version}, which storage shows now ({basis})"
