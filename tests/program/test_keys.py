"""Key files: what is written, and what is refused."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from grailnode.run import key_files


def test_a_key_is_created_once_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "keys" / "miner.key"
    key = key_files.read_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert key_files.read_or_create(path).public == key.public
    with pytest.raises(key_files.KeyFileError, match="there is a key already"):
        key_files.create(path)


def test_a_key_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path):
    path = tmp_path / "a.key"
    key_files.create(path)
    path.chmod(0o640)
    with pytest.raises(key_files.KeyFileError, match="chmod 600"):
        key_files.read(path)


@pytest.mark.parametrize("text", ["", "zz", "00" * 31, "00" * 33])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "a.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(key_files.KeyFileError, match="not a key"):
        key_files.read(path)


def test_a_key_never_shows_its_secret(tmp_path: Path):
    secret = key_files.create(tmp_path / "a.key")
    key = key_files.read_or_create(tmp_path / "a.key")
    assert secret.hex() not in repr(key)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_fifo_or_a_directory_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]):
    path = tmp_path / "a.key"
    make(path)
    with pytest.raises(key_files.KeyFileError, match=r"a\.key: not a regular file"):
        key_files.read_or_create(path)


def test_key_files_are_listed_in_order_and_an_unreadable_directory_is_an_error(tmp_path: Path):
    folder = tmp_path / "keys"
    assert key_files.list_key_files(folder) == []
    for name in ("b.key", "a.key"):
        key_files.create(folder / name)
    (folder / "a.invite").write_text("")
    assert key_files.list_key_files(folder) == [folder / "a.key", folder / "b.key"]
    with pytest.raises(key_files.KeyFileError, match=r"a\.key: cannot be listed"):
        key_files.list_key_files(folder / "a.key")
