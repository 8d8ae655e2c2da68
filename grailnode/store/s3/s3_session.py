"""A boto3 S3 client that reads nothing from the environment and lets no answer grow or drip without end.

botocore reads an answer that is not an object (a listing, an error) whole into memory, whatever its size, and its
timeouts hold for one packet, so a byte every few seconds never ends. Its `before-send` hook lets a client bring its
own HTTP: here the same session, with the body wrapped so that it stops at a ceiling and at a deadline.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

import boto3.session
import botocore
import botocore.session
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import HTTPClientError
from botocore.handlers import add_expect_header
from botocore.httpsession import URLLib3Session
from botocore.loaders import Loader, create_loader

from protocol.limits import MIB

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

MAX_ANSWER_BYTES: Final = 8 * MIB
"""A listing page of 1,000 keys has at most some 3 MiB of XML."""

_CHUNK: Final = 256 * 1024


@dataclass(frozen=True)
class S3Credentials:
    """What signs requests; the caller reads them from wherever it keeps secrets."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class S3Location:
    """A bucket and how to reach it.

    Attributes:
        bucket: its name.
        endpoint: URL of the service; None for AWS.
        region: what requests are signed for; 'auto' for R2.
        addressing: bucket in the path (MinIO, rclone), in the host name (AWS), or whatever botocore finds fit.
        connect_timeout, read_timeout: seconds for a connection, and between two packets.
        min_rate: bytes per second below which a transfer is given up.
        patience: seconds that every request may take beyond what `min_rate` allows its bytes.
        connections: requests at a time.
        part_bytes: larger objects go up in parts of this size (at least 5 MiB, as S3 demands), several at a time.
    """

    bucket: str
    endpoint: str | None = None
    region: str = "us-east-1"
    addressing: Literal["auto", "path", "virtual"] = "auto"
    connect_timeout: float = 10.0
    read_timeout: float = 30.0
    min_rate: float = 16_384.0
    patience: float = 60.0
    connections: int = 16
    part_bytes: int = 16 * MIB

    def __post_init__(self) -> None:
        if self.part_bytes < 5 * MIB:
            raise ValueError("S3 takes parts of at least 5 MiB")

    def seconds_for(self, size: int) -> float:
        """The longest that a request with `size` bytes of body may take."""
        return self.patience + size / self.min_rate


class _BoundedBody:
    """The body of an answer, as botocore reads it: at most `ceiling` bytes where one is set, and never too slowly."""

    def __init__(self, raw: Any, location: S3Location, ceiling: int | None) -> None:
        self._raw = raw
        self._location = location
        self._ceiling = ceiling
        self._count = 0
        self._start = time.monotonic()

    def read(self, amount: int | None = None) -> bytes:
        if amount is None:
            return b"".join(self.stream())
        # read1 returns what one packet brought; read would wait until `amount` bytes are there
        data: bytes = self._raw.read1(amount)
        self._count += len(data)
        if self._ceiling is not None and self._count > self._ceiling:
            raise HTTPClientError(error=f"an answer of more than {self._ceiling} bytes")
        if time.monotonic() - self._start > self._location.seconds_for(self._count):
            raise HTTPClientError(error=f"slower than {self._location.min_rate:g} bytes per second")
        return data

    def stream(self, amount: int = _CHUNK) -> Iterator[bytes]:
        while data := self.read(amount):
            yield data

    def close(self) -> None:
        self._raw.close()


class _BoundedHttp:
    """Sends botocore's requests over botocore's own HTTP session, and bounds what comes back."""

    def __init__(self, location: S3Location) -> None:
        self._location = location
        timeouts: Any = (location.connect_timeout, location.read_timeout)  # the stubs know of one number only
        self._session = URLLib3Session(timeout=timeouts, max_pool_connections=location.connections)

    def send(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        is_object = bool(request.stream_output)
        request.stream_output = True  # otherwise the session reads the whole body at once
        answer = self._session.send(request)
        if 300 <= answer.status_code < 400:
            # botocore would look for the bucket's region with a request that is redirected as well, without end
            raise HTTPClientError(error="redirected elsewhere: set the bucket's own region and endpoint")
        ceiling = None if is_object and answer.status_code < 300 else MAX_ANSWER_BYTES
        headers: Any = answer.headers
        return AWSResponse(answer.url, answer.status_code, headers, _BoundedBody(answer.raw, self._location, ceiling))

    def close(self) -> None:
        self._session.close()


class S3Session:
    """One client and its connections; safe to use from several threads."""

    def __init__(self, location: S3Location, credentials: S3Credentials | None) -> None:
        self._http = _BoundedHttp(location)
        self.client: S3Client = _client(location, credentials)
        # one round trip less for every put; redirects, which the header is meant for, are not followed
        self.client.meta.events.unregister("before-call.s3", add_expect_header)
        send: Any = self._http.send  # an answer that is returned stands in for botocore's own; the stubs expect None
        self.client.meta.events.register_first("before-send.s3", send)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
        self._http.close()


@cache
def _service_models() -> Loader:
    """botocore's description of S3, read once: it takes a quarter of a second, and a node opens many buckets."""
    return create_loader()


def _client(location: S3Location, credentials: S3Credentials | None) -> "S3Client":
    # the first two are what boto3 would read from the environment and the home directory before anything else
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
        connect_timeout=location.connect_timeout,
        read_timeout=location.read_timeout,
        max_pool_connections=location.connections,
        retries={"total_max_attempts": 1, "mode": "standard"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version=botocore.UNSIGNED if credentials is None else "s3v4",
        s3={"addressing_style": location.addressing},
        proxies={},
        **options,
    )
    return boto3.session.Session(
        aws_access_key_id=credentials.access_key if credentials else None,
        aws_secret_access_key=credentials.secret_key if credentials else None,
        aws_session_token=credentials.session_token if credentials else None,
        region_name=location.region,
        botocore_session=isolated,
    ).client("s3", endpoint_url=location.endpoint, config=config)
