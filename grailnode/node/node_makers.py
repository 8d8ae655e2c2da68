"""How a node is made from its configuration: with a name's key and state, as a canary, or to read or publish alone."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from grailnode import UserError
from grailnode.beacon.relays import RelayBeacon, StoreBeacon
from grailnode.config import Config
from grailnode.node import admission_credential
from grailnode.node.stores import Storage
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.time_check import SystemClock
from grailnode.run import creation, key_files
from grailnode.store.decorators.retrying import WaitingState
from grailnode.store.memory import MemoryStore
from grailnode.store.state.draft import StateDraft
from grailnode.store.state.state_store import StateStore
from protocol.errors import error_context
from protocol.identity.authority import Revisions
from protocol.identity.signing import Signed, SigningKey
from protocol.judging.report import canary_key
from protocol.run import RunManifest
from roles.node.identity import Node
from roles.ports import ObjectStore


def make_node(config: Config, name: str, telemetry: NodeTelemetry, *, repairing: bool = False) -> Node:
    """Return a node of this machine, with the key and the state of its name; a repair works on a draft of the state."""
    open_state = partial(_open_state, state_directory(config, name) / "objects", repairing=repairing)
    return _node(config, name, read_key(config, name), open_state, Storage(config, telemetry), telemetry)


def make_canary(config: Config, name: str, telemetry: NodeTelemetry, *, repairing: bool = False) -> Node:
    """Return the node of a trainer's newest canary: a miner's node, with a key that only this trainer can recognize.

    Its invitation, where the run invites its miners, is the file NAME-canary-NUMBER.invite beside the keys.
    """
    number = config.trainer.canaries - 1
    key = canary_key(read_key(config, name), number)
    if config.trainer.canary_store is not None:
        config = config.model_copy(update={"store": config.trainer.canary_store})
    elif config.store.meeting is not None:
        raise UserError(
            "trainer.canary_store: missing; a canary needs a bucket of its own, because in the trainer's bucket "
            "everybody would recognize it"
        )
    local_name = canary_state_name(config, name)
    open_state = partial(_open_state, state_directory(config, local_name) / "objects", repairing=repairing)
    public_name = f"node {key.public.hex()[:4]}"
    return _node(
        config, public_name, key, open_state, Storage(config, telemetry), telemetry, invitation_name=local_name
    )


def open_trainer_state(config: Config, name: str, canary: Node) -> ObjectStore:
    """Return the state of the trainer of a canary, to note there what the collector needs."""
    directory = state_directory(config, name) / "objects"
    return WaitingState(StateStore(directory, canary.run_id, repairing=False), canary.telemetry)


def make_spectator(config: Config) -> Node:
    """Return a node that only reads: its key is random and its state is in memory."""
    return _stateless_node(config, "spectator", writes=False)


def make_other_host(config: Config, name: str) -> Node:
    """Return a host of a trainer other than host 0, to repair its state: it has no key."""
    spectator, directory = make_spectator(config), state_directory(config, name) / "objects"
    return replace(spectator, state=_open_state(directory, spectator.run_id, repairing=True))


def make_auditor(config: Config, telemetry: NodeTelemetry | None = None) -> Node:
    """Return a spectator that reads every object from its origin, and none from a mirror or this machine's cache."""
    return _stateless_node(config, "auditor", telemetry, writes=False, caches=False)


def make_root_publisher(config: Config) -> Node:
    """Return a node that publishes what root keys signed: it writes, its key is random and its state is in memory."""
    return _stateless_node(config, "root-publisher", writes=True)


def _stateless_node(
    config: Config, name: str, telemetry: NodeTelemetry | None = None, *, writes: bool, caches: bool = True
) -> Node:
    telemetry = telemetry or NodeTelemetry(name)
    key, storage = SigningKey(secrets.token_bytes(32)), Storage(config, telemetry, writes=writes, caches=caches)
    return _node(config, name, key, lambda run_id: MemoryStore(), storage, telemetry)


def run_id_of(config: Config) -> bytes:
    return _open_run(config).digest


def state_directory(config: Config, name: str) -> Path:
    """Return the directory of a node's state: locks, files of the run, the engine's directory, and `objects`."""
    return config.at(config.node.state) / name


def newest_saved(config: Config, name: str) -> str:
    """Return what this host's state of a trainer has of the newest checkpoint and version, in words."""
    objects = state_directory(config, name) / "objects"
    newest = [
        max((path.name for path in (objects / kind).glob("*")), default="") for kind in ("checkpoints", "weights")
    ]
    return f"step {newest[0].partition('-')[0] or 'none'}, version {newest[1] or 'none'}"


def engine_directory(state: Path) -> Path:
    """Return the directory of an engine of vLLM in a node's state: its log, its weights, and a socket."""
    return state / "engine"


def canary_state_name(config: Config, name: str) -> str:
    """Return the name of the state of a trainer's newest canary."""
    return f"{name}-canary-{config.trainer.canaries - 1}"


def read_key(config: Config, name: str) -> SigningKey:
    """Return the key of a node of this machine; a missing one is made."""
    return key_files.read_or_create(config.at(config.node.keys) / f"{name}{key_files.SUFFIX}")


def _open_state(directory: Path, run_id: bytes, *, repairing: bool) -> StateStore | StateDraft:
    state = StateStore(directory, run_id, repairing=repairing)
    return StateDraft(state) if repairing else state


def _open_run(config: Config) -> Signed[RunManifest]:
    manifest = config.at(config.run.manifest)
    with error_context(manifest):
        return creation.open_run(manifest.read_bytes(), bytes.fromhex(config.run.id) if config.run.id else None)


def _node(
    config: Config,
    name: str,
    key: SigningKey,
    open_state: Callable[[bytes], StateStore | StateDraft | MemoryStore],
    storage: Storage,
    telemetry: NodeTelemetry,
    invitation_name: str = "",
) -> Node:
    """Return a node, whose invitation's file has the node's name if no other is given."""
    signed = _open_run(config)
    clock, state = SystemClock(), open_state(signed.digest)
    invitation = config.at(config.node.keys) / f"{invitation_name or name}{admission_credential.SUFFIX}"
    revisions = Revisions(signed.digest, signed.record.authority)
    # The announcements that it remembers are no reason to wait for a full disk.
    store = storage.routed(signed.record, revisions, key.public, state, clock)
    chain = signed.record.beacon
    relays = storage.relays(chain.chain_hash)
    return Node(
        run_id=signed.digest,
        run=signed.record,
        key=key,
        name=name,
        store=store,
        state=WaitingState(state, telemetry) if isinstance(state, StateStore) else state,
        clock=clock,
        beacon=RelayBeacon(relays, chain, clock) if relays else StoreBeacon(store, chain, clock),
        telemetry=telemetry,
        run_sync=trio.to_thread.run_sync,
        scratch=state.scratch,
        space=config.store.url if config.store.meeting is not None else "",
        credential=admission_credential.make_credential_source(invitation),
        shared_revisions=revisions,
    )
