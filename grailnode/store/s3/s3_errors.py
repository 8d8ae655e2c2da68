"""What an S3 service's refusals mean, in one clear line each."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from roles.ports import NotFoundError, StoreError

_advice: Final = {
    "NoSuchBucket": "there is no such bucket: check its name, the endpoint and the addressing style",
    "AccessDenied": "access denied: check what the bucket's policy allows these credentials",
    "InvalidAccessKeyId": "the service does not know this access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the session token has expired",
    "RequestTimeTooSkewed": "this machine's clock differs too much from the service's: set it",
    "AuthorizationHeaderMalformed": "the request was signed for another region: set the bucket's own",
    "SlowDown": "the service asks for fewer requests",
    "TooManyRequests": "the service asks for fewer requests",
    "QuotaExceeded": "the bucket's quota is used up",
}

_by_status: Final = {
    403: _advice["AccessDenied"],
    429: _advice["SlowDown"],
    503: "the service is unavailable or asks for fewer requests",
}

MISSING: Final = frozenset({"NoSuchKey", "NotFound", "404"})
"""Codes for an object that is not there; answers without a body carry the status as their code."""


class UnknownUploadError(StoreError):
    """The service does not know this multipart upload (any more)."""


class RangeBeyondEndError(StoreError):
    """The range begins behind the object's end."""


@contextmanager
def s3_errors(where: str) -> Iterator[None]:
    """Turn what botocore raises into a StoreError.

    Raises:
        NotFoundError: no such object.
        StoreError: anything else that went wrong on the way or over there.
    """
    try:
        yield
    except ClientError as error:
        raise _refusal(error, where) from error
    except (BotoCoreError, ResponseParserError, HTTPError, OSError) as error:
        raise StoreError(f"{where}: {_one_line(error)}") from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        # botocore takes the numbers and dates in headers and XML on trust, and falls over those that are none
        raise StoreError(f"{where}: not an answer of S3 ({_one_line(error)})") from error


def _refusal(error: ClientError, where: str) -> StoreError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in MISSING:
        return NotFoundError(f"{where}: no such object")
    if code == "NoSuchUpload":
        return UnknownUploadError(f"{where}: the service has forgotten this upload")
    if status == 416:
        return RangeBeyondEndError(f"{where}: the range begins behind the object's end")
    said = _advice.get(code) or _by_status.get(status) or "the service refused or failed"
    return StoreError(f"{where}: {said} ({status} {code[:60]!r})")


def _one_line(error: Exception) -> str:
    """botocore's own words, which name the endpoint and the cause, without line breaks and not endless."""
    return " ".join(str(error).split())[:300] or type(error).__name__
