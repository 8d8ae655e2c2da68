"""The store of a node's own state: files in envelopes, and a list of their names. A state that lies ends the node.

This is the one place where state is written and read (docs/guide/operate.md). It notices every object that is damaged,
cut off, missing, unreadable, of another run, or under another's name, and raises StateError with the name of the file,
what depends on it, and what to do.
"""

import errno
import io
import os
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from grailnode.store.checks import check_prefix, check_range, slice_object
from grailnode.store.disk import advice
from grailnode.store.local import LocalStore
from grailnode.store.state import envelope, name_list
from grailnode.store.state.envelope import DamageError, ForeignError
from grailnode.store.state.name_list import NameList
from roles.ports import NotFoundError, ObjectInfo, StateError, StoreError, TooLargeError

_FORBIDDEN: Final = {
    errno.EACCES: "permission denied; give it to the user who runs the node",
    errno.EPERM: "operation not permitted; give it to the user who runs the node",
}
_UNREADABLE: Final = {
    errno.EIO: "the disk reports an input/output error",
    errno.EISDIR: "a folder, and not a file",
    errno.ELOOP: "a symbolic link, which is not followed",
    errno.ENOTDIR: "not there: a part of its path is a file",
}
"""Errors of reading that do not pass by themselves. Others, such as too many open files, stay a StoreError."""
_OBSTRUCTED: Final = {
    errno.EISDIR: "a folder, and not a file",
    errno.ENOTDIR: "a part of its path is a file",
    errno.EEXIST: "a part of its path is a file",
    errno.ELOOP: "a part of its path is a symbolic link",
}
"""Errors of writing that mean that the disk has something else in the place of the object."""
_CONTENTS: Final = {
    ".names": "the names of all objects of this state",
    "trust": "the oldest chain that this node may follow",
    "authority/": "who may act in the run",
    "announcements/": "where another participant is",
    "proof-of-work": "this miner's proof of work",
    "ledger/": "a window of this validator's ledger, from which its scores follow",
    "ledger-floor": "the newest window that this validator must not seal again",
    "sealed/": "a verdict of a window that is sealed and not revealed",
    "pending/": "a window that is sealed and not revealed",
    "witness/": "the witness of a window that is sealed and not revealed",
    "weights/": "the weights of a version, which this trainer publishes or makes its next patch from",
    "chain/": "what this trainer has published and must not sign twice",
    "training/": "the note of a checkpoint with which training goes on",
    "checkpoints/": "the weights, the optimizer's state or the waiting groups with which training goes on",
    "outbox/": "a version that is not published yet",
    "inbox/": "verified groups that are not trained on yet",
    "acknowledged": "the record by which no group is trained on twice",
    "intents/": "a decision on groups that is not carried out yet",
    "outcomes/": "the record by which no group is trained on twice",
    "collector-progress": "the record by which no group is trained on twice",
    "outer/": "the rounds of sites that train together",
    "canaries/": "a group as this trainer's canary computes it",
    "distrusted/": "the reason why a validator's verdicts do not count",
}

REMAKEABLE: Final = ("announcements/", "proof-of-work", "canaries/")
"""Kinds that a node makes again by itself, or works without, when one is missing or damaged."""


class IntactStateError(StateError):
    """A file of another run or another version of this program, or a forbidden one. A repair would destroy it."""

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


class StateStore(LocalStore):
    """Implements ObjectStore for a node's own state, which all processes of the node share. A state of another run is
    refused.

    StateError if the list of names is missing or damaged; while a repair writes it from the files, none is needed.
    StoreError if the directory cannot be created or read.
    """

    def __init__(self, root: Path, run_id: bytes, *, inline: bool = False, repairing: bool = False) -> None:
        super().__init__(root, inline=inline)
        self._run_id = run_id
        self._names = NameList(self._root, run_id)
        with self._state_errors(name_list.NAME):
            try:
                self._names.open(lambda: next(self._walk("", ""), None) is None)
            except (DamageError, OSError) as error:
                if not repairing or isinstance(error, ForeignError):
                    raise
                self._names.rewrite([info.path for info in self._walk("", "")])

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get. All of the object is read and checked, whatever the range."""
        check_range(max_bytes, offset, size)
        data = await super().get(path, max_bytes if offset == 0 and size is None else 1 << 62)
        return data if offset == 0 and size is None else slice_object(data, path, max_bytes, offset, size)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; that an object is lost is raised after those that are there."""
        check_prefix(prefix)
        paths = set()
        async for info in super().list(prefix, after=after):
            paths.add(info.path)
            yield ObjectInfo(info.path, max(0, info.size - envelope.header_size(info.path)))
        missing = [path for path in await self._run(lambda: self._missing(prefix, paths)) if path > after]
        if missing:
            others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise self._error(missing[0], f"missing{others}")

    async def scan(self) -> dict[str, StateError | None]:
        """Read every object that is there or must be there; return by path what is wrong with it, None for nothing."""
        with self._state_errors(name_list.NAME):
            paths = self._names.names()
        paths |= {info.path for info in self._walk("", "")}
        results: dict[str, StateError | None] = {}
        for path in sorted(paths):
            try:
                await self.get(path, 1 << 62)
            except IntactStateError:
                raise
            except StateError as error:
                results[path] = error
            except NotFoundError as error:
                results[path] = StateError(self._root / path, str(error))
            else:
                results[path] = None
        return results

    async def forget(self, path: str) -> None:
        """Remove an object that is damaged or missing, so that the state is whole without it."""

        def remove() -> None:
            target = self._root / path
            with self._state_errors(path), self._names.removal(path):
                if target.is_dir() and not target.is_symlink():
                    target.rmdir()
                else:
                    target.unlink(missing_ok=True)

        await self._run(remove)

    def _encode(self, path: str, data: bytes) -> tuple[bytes, ...]:
        return envelope.encode(path, self._run_id, data), data

    def _put(self, path: str, data: bytes) -> None:
        try:
            super()._put(path, data)
        except StoreError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in _OBSTRUCTED:
                raise self._error(path, _OBSTRUCTED[cause.errno]) from error
            raise
        with self._state_errors(path):
            self._names.add(path)

    def _unlink(self, path: str) -> bool:
        if (self._root / path).is_dir():
            return False
        with self._state_errors(path), self._names.removal(path):
            return super()._unlink(path)

    def _get(self, path: str, max_bytes: int, offset: int, size: int | None) -> bytes:
        try:
            return super()._get(path, max_bytes, offset, size)
        except ForeignError as error:
            raise IntactStateError(self._root / path, str(error)) from error
        except DamageError as error:
            raise self._error(path, str(error)) from error
        except (NotFoundError, TooLargeError) as error:
            target = self._root / path
            with self._state_errors(path):
                is_lost = isinstance(error, NotFoundError) and self._names.contains(path)
            if is_lost and not path.startswith(REMAKEABLE):
                what = "not a regular file" if os.path.lexists(target) else "missing"
                raise self._error(path, what) from error
            raise
        except StoreError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in _FORBIDDEN:
                raise IntactStateError(self._root / path, _FORBIDDEN[cause.errno]) from error
            if isinstance(cause, OSError) and cause.errno in _UNREADABLE:
                raise self._error(path, _UNREADABLE[cause.errno]) from error
            raise

    def _read(self, descriptor: int, path: str, max_bytes: int, offset: int, size: int | None) -> bytes:
        """Return the object in an open file, checked. There is one copy of it in memory."""
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotFoundError(f"{path}: no such object")
        with io.FileIO(descriptor, closefd=False) as file:
            head = file.read(envelope.header_size(path))
            contents = envelope.decode(head, status.st_size)
            contents.check_place(path, self._run_id)
            if contents.length > max_bytes:
                raise TooLargeError(f"{path}: {contents.length} bytes where at most {max_bytes} are allowed")
            data = file.readall()
        if len(data) != contents.length:
            raise DamageError(f"cut off: {len(data)} bytes of data instead of {contents.length}")
        if envelope.data_digest(data) != contents.digest:
            raise DamageError("damaged: its content does not have the digest that was written with it")
        return data

    def _missing(self, prefix: str, paths: set[str]) -> Sequence[str]:
        """Return the paths in the list of names that begin with a prefix and are not there, in order.

        Another process of this node may have deleted one, or stored one, since `paths` were listed. A name is removed
        from the list before its file, and added after it.
        """
        with self._state_errors(name_list.NAME):
            missing = [
                path
                for path in self._names.names(prefix) - paths
                if not (self._root / path).is_file() and not path.startswith(REMAKEABLE)
            ]
            return sorted(path for path in missing if self._names.contains(path)) if missing else ()

    def _error(self, path: str, what: str) -> StateError:
        prefixes = [prefix for prefix in _CONTENTS if path.startswith(prefix)]
        contents = _CONTENTS[max(prefixes, key=len)] if prefixes else "a part of this node's state"
        return StateError(self._root / path, f"{what}; it holds {contents}")

    @contextmanager
    def _state_errors(self, path: str) -> Iterator[None]:
        """Turn errors of the list of names into StateError, or into StoreError where another try may help."""
        try:
            yield
        except ForeignError as error:
            raise IntactStateError(self._root / name_list.NAME, str(error)) from error
        except DamageError as error:
            raise self._error(name_list.NAME, str(error)) from error
        except OSError as error:
            if error.errno in _FORBIDDEN:
                raise IntactStateError(self._root / path, _FORBIDDEN[error.errno]) from error
            if error.errno in _UNREADABLE and error.errno != errno.EIO:
                raise self._error(path, _UNREADABLE[error.errno]) from error
            raise StoreError(f"{self._root / path}: {advice(error)}") from error
