"""Key files: what is written, and what is refused."""

from pathlib import Path

import pytest

from grailnode import keys


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "keys" / "miner.key"
    made = keys.read_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.read_or_create(path).public == made.public
    with pytest.raises(keys.KeyFileError, match="there is a key already"):
        keys.create(path)


def test_a_key_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path):
    path = tmp_path / "a.key"
    keys.create(path)
    path.chmod(0o640)
    with pytest.raises(keys.KeyFileError, match="chmod 600"):
        keys.read(path)


@pytest.mark.parametrize("text", ["", "zz", "00" * 31, "00" * 33])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "a.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(keys.KeyFileError, match="not a key"):
        keys.read(path)


def test_a_key_never_shows_its_secret(tmp_path: Path):
    secret = keys.create(tmp_path / "a.key")
    key = keys.read_or_create(tmp_path / "a.key")
    assert secret.hex() not in repr(key)
