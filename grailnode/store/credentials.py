"""Reads S3 credentials from the environment or from a file that only its owner can read; never from run.toml."""

import configparser
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from grailnode import UserError
from grailnode.store.s3.s3_session import S3Credentials

_ACCESS, _SECRET, _TOKEN = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"


class CredentialsError(UserError):
    """Storage credentials cannot be used. The message says which, why, and what to do."""


def read_credentials(path: Path | None, environment: Mapping[str, str] = os.environ) -> S3Credentials | None:
    """Return the credentials in a file in the format of AWS's credentials file (section `default`), or in the
    environment, None if that has none; CredentialsError if the file is missing, readable by others, or has none, or the
    environment has only one of the two keys.
    """
    if path is None:
        access, secret = environment.get(_ACCESS.upper(), ""), environment.get(_SECRET.upper(), "")
        if not access and not secret:
            return None
        if not access or not secret:
            present, absent = (_ACCESS, _SECRET) if access else (_SECRET, _ACCESS)
            raise CredentialsError(
                f"{absent.upper()} is not set in the environment, but {present.upper()} is; set both"
            )
        return S3Credentials(access, secret, environment.get(_TOKEN.upper()) or None)
    return _read_file(path)


def _read_file(path: Path) -> S3Credentials:
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise CredentialsError(f"{path}: others may read these credentials; run `chmod 600 {path}`")
            parser = configparser.ConfigParser(interpolation=None)
            parser.read_string(file.read())
    except FileNotFoundError:
        raise CredentialsError(f"{path}: no such file; write {_ACCESS} and {_SECRET} under [default] into it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(f"{path}: cannot be read ({type(error).__name__})") from None
    except configparser.Error:
        raise CredentialsError(f"{path}: not a credentials file; it begins with the line [default]") from None
    section = parser["default"] if parser.has_section("default") else {}
    access, secret = section.get(_ACCESS, ""), section.get(_SECRET, "")
    if not access or not secret:
        raise CredentialsError(f"{path}: {_ACCESS} and {_SECRET} are missing; write both under [default]")
    return S3Credentials(access, secret, section.get(_TOKEN) or None)
