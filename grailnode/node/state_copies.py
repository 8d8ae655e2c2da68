"""`grailnode backup` and `grailnode restore`: copies of a stopped node's state, each object checked
(docs/guide/operate.md).

A backup has a directory for each state (the node's, and its canary's), which holds the same files as the state. The
list of names is written last, so a backup that was interrupted is not taken for a whole one.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from blake3 import blake3

from grailnode import UserError
from grailnode.config import Config
from grailnode.node.node_makers import canary_state_name, run_id_of, state_directory
from grailnode.node.state_locks import lock_whole_state
from grailnode.store.checks import is_path
from grailnode.store.disk import make_folder, sync_folder
from grailnode.store.state import envelope, name_list
from grailnode.store.state.envelope import EnvelopeError
from grailnode.store.state.name_list import NameListError
from roles.ports import LineReporter

_OBJECTS: Final = "objects"
_PIECE_BYTES: Final = 1 << 22


class BackupError(UserError):
    """A state cannot be copied; the text says why."""


def back_up(config: Config, name: str, directory: Path, say: LineReporter) -> None:
    """Copy the states of a stopped node into a new directory.

    Raises:
        BackupError: the state is damaged, or the directory is not empty.
    """
    if directory.exists() and any(directory.iterdir()):
        raise BackupError(f"{directory}: is not empty; name a new directory for each backup")
    with lock_whole_state(state_directory(config, name)):
        for state_name in _state_names(config, name):
            source = state_directory(config, state_name) / _OBJECTS
            if source.is_dir():
                count, size = _copy_state(source, directory / state_name / _OBJECTS, run_id_of(config))
                say(f"{directory / state_name}: {count} objects, {size} bytes")
            elif state_name == name:
                raise BackupError(f"{source}: no such state; is --name the name of the node?")


def restore(config: Config, name: str, directory: Path, say: LineReporter) -> None:
    """Copy the states of a node back from a backup. All of it is checked before it takes the state's place.

    Raises:
        BackupError: the backup is not whole, or there is a state already.
    """
    if not (directory / name / _OBJECTS).is_dir():
        raise BackupError(f"{directory}: has no state of {name}")
    names = [state_name for state_name in _state_names(config, name) if (directory / state_name).is_dir()]
    with lock_whole_state(state_directory(config, name)):
        for state_name in names:
            target = state_directory(config, state_name) / _OBJECTS
            if target.exists() and next(_files(target), None) is not None:
                raise BackupError(f"{target}: there is a state already; move it away first")
        for state_name in names:
            target = state_directory(config, state_name) / _OBJECTS
            copy = target.with_name(f"{_OBJECTS}.restored")
            shutil.rmtree(copy, ignore_errors=True)
            count, size = _copy_state(directory / state_name / _OBJECTS, copy, run_id_of(config))
            shutil.rmtree(target, ignore_errors=True)
            copy.rename(target)
            sync_folder(target.parent)
            say(f"{target}: {count} objects, {size} bytes")
    say("If the node has published more since the backup, it says so at its start: then run `grailnode repair`.")


def _state_names(config: Config, name: str) -> tuple[str, ...]:
    return (name, canary_state_name(config, name)) if config.trainer.canaries else (name,)


def _copy_state(source: Path, target: Path, run_id: bytes) -> tuple[int, int]:
    """Copy a state, and return the number of its objects and the bytes of their files."""
    title = name_list.title(run_id)
    try:
        names = name_list.parse((source / name_list.NAME).read_bytes(), title)
    except (NameListError, OSError) as error:
        what = (error.strerror or "unreadable").lower() if isinstance(error, OSError) else str(error)
        raise BackupError(f"{source / name_list.NAME}: {what}; this is not a whole state") from error
    paths = sorted(names | set(_files(source)))
    make_folder(target)
    size = 0
    for path in paths:
        make_folder((target / path).parent)
        try:
            size += _copy_object(source / path, target / path, path, run_id)
        except (EnvelopeError, OSError) as error:
            what = (error.strerror or "unreadable").lower() if isinstance(error, OSError) else str(error)
            raise BackupError(f"{source / path}: {what}; only a whole state is copied") from error
    for folder in {(target / path).parent for path in paths}:
        sync_folder(folder)
    name_list.write(target / name_list.NAME, title, paths)
    return len(paths), size


def _files(root: Path) -> Iterator[str]:
    """Yield the paths of the objects of a state."""
    for folder, _, files in os.walk(root):
        for file in files:
            path = (Path(folder) / file).relative_to(root).as_posix()
            if is_path(path):
                yield path


def _copy_object(source: Path, target: Path, path: str, run_id: bytes) -> int:
    """Copy the file of an object piece by piece, check it on the way, and return its bytes."""
    with source.open("rb") as file, target.open("wb") as copy:
        size = os.fstat(file.fileno()).st_size
        head = file.read(envelope.header_size(path))
        contents = envelope.decode(head, size)
        contents.check_place(path, run_id)
        copy.write(head)
        hasher = blake3()
        while piece := file.read(_PIECE_BYTES):
            hasher.update(piece)
            copy.write(piece)
        contents.check_digest(hasher.digest())
        copy.flush()
        os.fsync(copy.fileno())
    return size
