"""A boto3 S3 client that reads nothing from the environment, and bounds the size and the time of every response; and
the credentials of a node, from the environment or a file that only its owner can read, never from run.toml.

botocore reads a response that is not an object (a listing, an error) into memory, whatever its size. Its timeouts apply
to single packets, so that a response of one byte every few seconds never ends. Its `before-send` hook lets a client
send requests itself. Here the hook uses botocore's own HTTP session and wraps the body of the response, which then has
a maximum size and a deadline. Errors become one line that says what to do.
"""

import configparser
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import boto3.session
import botocore
import botocore.session
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError, HTTPClientError
from botocore.handlers import add_expect_header
from botocore.httpsession import URLLib3Session
from botocore.loaders import Loader, create_loader
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from grailnode import UserError
from grailnode.store.checks import one_line
from grailnode.store.place import PlaceSection
from protocol.limits import MIB
from roles.ports import NotFoundError, StoreError

_advice: Final = {
    "NoSuchBucket": "there is no such bucket: check its name, the endpoint and the addressing style",
    "AccessDenied": "access denied: check what the bucket's policy allows these credentials",
    "InvalidAccessKeyId": "the service does not know this access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the session token has expired",
    "RequestTimeTooSkewed": "this machine's clock differs too much from the service's: set it",
    "AuthorizationHeaderMalformed": "the request was signed for another region: set store.region to the bucket's own",
    "PermanentRedirect": "the bucket is in another region: set store.region to the bucket's own, or its endpoint",
    "SlowDown": "too many requests: lower requests_per_second",
    "TooManyRequests": "too many requests: lower requests_per_second",
    "QuotaExceeded": "the bucket's quota is used up",
}

_by_status: Final = {
    403: _advice["AccessDenied"],
    429: _advice["SlowDown"],
    503: "the service is unavailable, or there are too many requests",
}

NOT_FOUND_CODES: Final = frozenset({"NoSuchKey", "NotFound", "404"})
"""Error codes for a missing object. In a response without a body, botocore uses the status as the code."""


class RangeBeyondEndError(StoreError):
    """The range begins after the end of the object."""


@contextmanager
def s3_errors(where: str) -> Iterator[None]:
    """Turn what botocore raises in the block into NotFoundError for a missing object, else into StoreError."""
    try:
        yield
    except ClientError as error:
        raise _store_error(error, where) from error
    except EndpointConnectionError as error:
        url = urlsplit(error.kwargs["endpoint_url"])
        advice = 'check store.endpoint, and set store.addressing = "path" if the bucket\'s name stands in that host'
        raise StoreError(f"{where}: cannot connect to {url.scheme}://{url.netloc}: {advice}") from error
    except (BotoCoreError, ResponseParserError, HTTPError, OSError) as error:
        raise StoreError(f"{where}: {one_line(error)}") from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        # botocore does not check numbers and dates in headers and XML, and raises these for invalid ones
        raise StoreError(f"{where}: the response is not valid S3 ({one_line(error)})") from error


def _store_error(error: ClientError, where: str) -> StoreError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in NOT_FOUND_CODES:
        return NotFoundError(f"{where}: no such object")
    if status == 416:
        return RangeBeyondEndError(f"{where}: the range begins after the end of the object")

    advice = _advice.get(code) or _by_status.get(status) or "the service refused or failed"
    return StoreError(f"{where}: {advice} ({status} {code[:60]!r})")


if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

MAX_RESPONSE_BYTES: Final = 8 * MIB
"""A listing page of 1,000 keys has at most some 3 MiB of XML."""

_CHUNK_BYTES: Final = 256 * 1024
_ACCESS, _SECRET, _TOKEN = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"


@dataclass(frozen=True)
class S3Credentials:
    """Signs requests."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


def read_credentials(path: Path | None, environment: Mapping[str, str] = os.environ) -> S3Credentials | None:
    """Return the credentials in a file in the format of AWS's credentials file (section `default`), or in the
    environment, None if that has none; UserError if the file is missing, readable by others, or has none, or the
    environment has only one of the two keys.
    """
    if path is None:
        access, secret = environment.get(_ACCESS.upper(), ""), environment.get(_SECRET.upper(), "")
        if not access and not secret:
            return None
        if not access or not secret:
            present, absent = (_ACCESS, _SECRET) if access else (_SECRET, _ACCESS)
            raise UserError(f"{absent.upper()} is not set in the environment, but {present.upper()} is; set both")
        return S3Credentials(access, secret, environment.get(_TOKEN.upper()) or None)
    return _read_file(path)


def _read_file(path: Path) -> S3Credentials:
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UserError(f"{path}: others may read these credentials; run `chmod 600 {path}`")
            parser = configparser.ConfigParser(interpolation=None)
            parser.read_string(file.read())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; write {_ACCESS} and {_SECRET} under [default] into it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__})") from None
    except configparser.Error:
        raise UserError(f"{path}: not a credentials file; it begins with the line [default]") from None
    section = parser["default"] if parser.has_section("default") else {}
    access, secret = section.get(_ACCESS, ""), section.get(_SECRET, "")
    if not access or not secret:
        raise UserError(f"{path}: {_ACCESS} and {_SECRET} are missing; write both under [default]")
    return S3Credentials(access, secret, section.get(_TOKEN) or None)


class _BoundedBody:
    """The body of a response, as botocore reads it, with a deadline and, unless it is an object, a maximum size."""

    def __init__(self, raw: Any, place: PlaceSection, max_bytes: int | None) -> None:
        self._raw = raw
        self._place = place
        self._max_bytes = max_bytes
        self._count = 0
        self._start = time.monotonic()

    def read(self, amount: int | None = None) -> bytes:
        if amount is None:
            return b"".join(self.stream())
        # read1 returns the bytes of one packet; read would wait for `amount` bytes
        data: bytes = self._raw.read1(amount)
        self._count += len(data)
        if self._max_bytes is not None and self._count > self._max_bytes:
            raise HTTPClientError(error=f"the response has more than {self._max_bytes} bytes")
        if time.monotonic() - self._start > self._place.seconds_for(self._count):
            raise HTTPClientError(
                error=f"the response is slower than {self._place.min_bytes_per_second:g} bytes per second"
            )
        return data

    def stream(self, amount: int = _CHUNK_BYTES) -> Iterator[bytes]:
        while data := self.read(amount):
            yield data

    def close(self) -> None:
        self._raw.close()


class S3Session:
    """A boto3 client that sends requests over botocore's own HTTP session, whose responses are bounded; several threads
    may use it.
    """

    def __init__(self, place: PlaceSection, credentials: S3Credentials | None) -> None:
        self._place = place
        timeouts: Any = (place.connect_seconds, place.silence_seconds)  # the stubs have a single number
        self._http = URLLib3Session(timeout=timeouts, max_pool_connections=place.concurrency)
        self.client: S3Client = _client(place, credentials)
        # the Expect header costs every put a round trip, and helps only with redirects, which are not followed
        self.client.meta.events.unregister("before-call.s3", add_expect_header)
        send: Any = self._send  # a returned response replaces botocore's own; the stubs expect None
        self.client.meta.events.register_first("before-send.s3", send)

    def _send(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        is_object = bool(request.stream_output)
        request.stream_output = True  # otherwise the session reads the whole body at once
        response = self._http.send(request)
        if 300 <= response.status_code < 400:
            # botocore would ask for the bucket's region, with a request that is redirected as well, without end
            raise HTTPClientError(error="the service redirects the request: set the bucket's own region and endpoint")
        max_bytes = None if is_object and response.status_code < 300 else MAX_RESPONSE_BYTES
        body = _BoundedBody(response.raw, self._place, max_bytes)
        headers: Any = response.headers
        return AWSResponse(response.url, response.status_code, headers, body)

    def close(self) -> None:
        self.client.close()
        self._http.close()


@cache
def _service_models() -> Loader:
    """Return a loader that caches botocore's description of S3, because reading it takes 0.25 s for each bucket."""
    return create_loader()


def _client(place: PlaceSection, credentials: S3Credentials | None) -> "S3Client":
    # without these, boto3 reads the environment and the home directory
    isolated = botocore.session.Session(
        session_vars={
            "profile": (None, None, None, None),
            "config_file": (None, None, os.devnull, None),
            "credentials_file": (None, None, os.devnull, None),
        }
    )
    isolated.register_component("data_loader", _service_models())
    options: dict[str, Any] = {"ignore_configured_endpoint_urls": True}  # not in the stubs
    config = Config(
        connect_timeout=place.connect_seconds,
        read_timeout=place.silence_seconds,
        max_pool_connections=place.concurrency,
        retries={"total_max_attempts": 1, "mode": "standard"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version=botocore.UNSIGNED if credentials is None else "s3v4",
        s3={"addressing_style": place.addressing},
        proxies={},
        **options,
    )
    return boto3.session.Session(
        aws_access_key_id=credentials.access_key if credentials else None,
        aws_secret_access_key=credentials.secret_key if credentials else None,
        aws_session_token=credentials.session_token if credentials else None,
        region_name=place.region,
        botocore_session=isolated,
    ).client("s3", endpoint_url=place.endpoint or None, config=config)
