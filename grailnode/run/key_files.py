"""Secret keys as files: 32 bytes in hexadecimal, readable by their owner alone."""

import os
import secrets
import stat
from pathlib import Path

from grailnode import UserError
from grailnode.store.disk import write_through
from protocol.identity.signing import SigningKey

SUFFIX = ".key"


def create(path: Path, secret: bytes | None = None) -> bytes:
    """Write a new secret key with mode 0600, by default a random one of 32 bytes, and return it; UserError if it
    cannot be written, or there is a file already.
    """
    secret = secret if secret is not None else secrets.token_bytes(32)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write_through(descriptor, f"{secret.hex()}\n".encode())
        except BaseException:
            path.unlink(missing_ok=True)  # a part of a key would be in the way of the next attempt
            raise
        finally:
            os.close(descriptor)
    except FileExistsError:
        raise UserError(f"{path}: there is a file already; move it away first") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    return secret


def read(path: Path) -> bytes:
    """Return the 32 bytes of a key file; UserError if it is missing, others may read it, or it is not a key."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # opening a FIFO would wait for a writer
            raise UserError(f"{path}: not a regular file; put the key itself there")
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise UserError(f"{path}: no such key; `grailnode init` makes a run's keys") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"{path}: others may read it; run `chmod 600 {path}`")
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != 32:
        raise UserError(f"{path}: not a key (64 hexadecimal digits)")
    return secret


def list_key_files(directory: Path) -> list[Path]:
    """Return the key files of a directory in order, none of a missing one; UserError if it cannot be listed."""
    try:
        return sorted(path for path in directory.iterdir() if path.suffix == SUFFIX)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{directory}: cannot be listed ({(error.strerror or 'unknown').lower()})") from error


def read_or_create(path: Path) -> SigningKey:
    """Return the signing key of a file, which is created if it is missing."""
    return SigningKey(read(path) if path.exists() else create(path))
