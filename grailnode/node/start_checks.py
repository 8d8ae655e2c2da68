"""What a node checks at its start, before it pledges anything or promises to judge.

A node that cannot work should say so in one line while its operator watches, and not after hours in which others
waited for it. It writes an object of its own space, reads it back, also by the URL that it announces, and deletes it;
it looks at the meeting point and at its own invitation. time_check.py and disk_check.py have the rest.
"""

import os
import secrets
from contextlib import suppress
from typing import Final

import torch
import trio

from grailnode import UserError
from grailnode.node import admission_credential
from grailnode.run.key_files import KeyFileError
from protocol import paths
from protocol.errors import AdmissionError
from roles.node.identity import Node
from roles.ports import NotFoundError, ObjectStore, StoreError

_PROBE_BYTES: Final = 32
_ATTEMPTS: Final = 3  # because storage that works may answer wrongly once
_PAUSE_SECONDS: Final = 1.0


async def check_space(node: Node, announced: ObjectStore | None) -> None:
    """Write, read back and delete an object of the node's own space, which strangers read at `announced`, if any do."""
    for remaining_attempts in reversed(range(_ATTEMPTS)):
        try:
            await _check_space(node, announced)
        except UserError:
            if not remaining_attempts:
                raise
            await trio.sleep(_PAUSE_SECONDS)
        else:
            return


async def _check_space(node: Node, announced: ObjectStore | None) -> None:
    path, content = paths.probe(node.key.public, secrets.token_hex(8)), secrets.token_bytes(_PROBE_BYTES)
    try:
        await _check_probe(node, announced, path, content)
    except UserError:
        with suppress(StoreError):
            await node.store.delete(path)
        raise
    try:
        await node.store.delete(path)
    except StoreError as error:
        raise UserError(f"this node cannot delete objects of its own space: {error}") from error


async def _check_probe(node: Node, announced: ObjectStore | None, path: str, content: bytes) -> None:
    try:
        await node.store.put(path, content)
        if await node.store.get(path, _PROBE_BYTES) != content:
            raise UserError(f"{path}: storage shows other bytes than this node wrote there")
    except StoreError as error:
        raise UserError(f"this node cannot write to its own space and read it: {error}") from error
    try:
        answer = content if announced is None else await announced.get(path, _PROBE_BYTES)
    except StoreError as error:
        missing = isinstance(error, NotFoundError)
        hint = "is it this bucket's public URL?" if missing else "may everybody read the bucket?"
        raise UserError(
            f"store.url {node.space}: others cannot read there what this node writes ({error}); {hint}"
        ) from error
    if answer != content:
        raise UserError(f"store.url {node.space}: shows other bytes than this node wrote; is it this bucket's URL?")


async def check_meeting_point(node: Node) -> None:
    """Raise UserError if the place cannot be listed where participants announce themselves."""
    try:
        async for _ in node.store.list(paths.participants()):
            break
    except StoreError as error:
        raise UserError(f"this node cannot see the run's participants at the meeting point: {error}") from error


async def check_admission(node: Node) -> None:
    """Raise UserError if validators will not consider this miner, by its invitation or the run's list of miners."""
    try:
        await admission_credential.check_admitted(node)
    except (AdmissionError, KeyFileError) as error:
        key = node.key.public.hex()
        raise UserError(
            f"this run admits miners by {node.authority.admission.policy}, and does not admit this one ({error}); its "
            f"founder runs `grailnode admit {key}`"
        ) from error


def check_ranks(device: str, count: int) -> None:
    """Raise UserError if a trainer's ranks have too few devices, or of a kind that ranks cannot share."""
    if device not in ("cpu", "cuda"):
        raise UserError(
            f'engine.device: with trainer.gpus = {count} it is "cuda" or "cpu", not {device!r}: each process takes a '
            "GPU of its own"
        )
    present = torch.cuda.device_count() if device == "cuda" else len(os.sched_getaffinity(0))
    if count > present:
        things = "GPUs" if device == "cuda" else "processor cores"
        raise UserError(f"trainer.gpus: {count}, but this machine has {present} {things}")
