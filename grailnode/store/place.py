"""Where objects are stored, and how much may be asked of the service that stores them: the sections of run.toml that
name a place.
"""

import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from protocol.identity.participant import SPACE_FORM
from roles.settings_base import Settings

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]

URL_RULE: Final = "a url is https://host[:port][/path], host in lower case, without user, query or a slash at the end"
"""What `is_space_url` accepts, in words."""

_BASE_SECONDS: Final = 60.0


def is_space_url(text: str) -> bool:
    """Return whether objects may be read below a URL: see `URL_RULE`, and plain http on this machine."""
    return re.fullmatch(SPACE_FORM, text) is not None


class PlaceSection(Settings):
    """Where objects are stored: a directory, an S3 bucket (or its part below `prefix`), or a base URL to read from."""

    kind: Literal["local", "s3", "https"] = "local"
    """A directory of this machine, a bucket, or a base URL that is only read."""
    path: Path = Path("store")
    """The directory, for kind local."""
    url: str = ""
    """Where everybody else reads the same objects; for kind https, the base URL that is read."""
    bucket: str = ""
    """The name of the bucket, for kind s3."""
    endpoint: str = ""
    """The URL of the bucket's service; empty for AWS."""
    region: str = "us-east-1"
    """The bucket's region."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Whether the bucket's name stands in the path or in the host of a request."""
    prefix: str = Field(default="", pattern=r"^([A-Za-z0-9_~-][A-Za-z0-9._~-]*/?)*$")
    """The part of the bucket below which everything is."""
    credentials: Path | None = None
    """A file with the keys of the bucket, mode 0600; without it, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the
    environment.
    """
    concurrency: int = Field(default=16, ge=1, le=256)
    """Requests at the same time."""
    requests_per_second: Positive = 100.0
    """Requests a second, in the long run."""
    attempts: Count = 6
    """Attempts of a request before it fails."""
    connect_seconds: Positive = 10.0
    """How long a connection may take."""
    silence_seconds: Positive = 30.0
    """How long a server may send nothing."""
    deadline_seconds: Positive = 3600.0
    """How long a request may take with all of its attempts."""
    min_bytes_per_second: Positive = 16_384.0
    """A slower transfer is given up."""

    @model_validator(mode="after")
    def _check_place(self) -> "PlaceSection":
        if self.kind == "s3" and not self.bucket:
            raise ValueError('kind "s3" needs a bucket')
        if self.kind == "https" and not self.url:
            raise ValueError('kind "https" needs a url')
        if self.prefix and self.kind != "s3":
            raise ValueError('only kind "s3" has a prefix; a url or path names the folder')
        if not is_space_url(self.url):  # an empty one is
            raise ValueError(URL_RULE)
        return self

    def seconds_for(self, size: int) -> float:
        """Return the deadline of a request with a body of `size` bytes: a minute beyond what the least rate allows."""
        return min(_BASE_SECONDS, self.deadline_seconds) + size / self.min_bytes_per_second
