"""Translates the errors of an S3 service into one line that says what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from grailnode.store.checks import RefusedError, one_line
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


class UnknownUploadError(StoreError):
    """The service does not know this multipart upload, or no longer."""


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
    if code == "NoSuchUpload":
        return UnknownUploadError(f"{where}: the service does not know this multipart upload")
    if status == 416:
        return RangeBeyondEndError(f"{where}: the range begins after the end of the object")

    advice = _advice.get(code) or _by_status.get(status) or "the service refused or failed"
    kind = RefusedError if advice == _advice["AccessDenied"] else StoreError
    return kind(f"{where}: {advice} ({status} {code[:60]!r})")
