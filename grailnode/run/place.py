"""Where `grailnode init` puts a run, or a node of somebody else's run: in which bucket, and how others read it."""

from typing import Literal

from pydantic import Field

from roles.settings_base import Settings


class Place(Settings):
    """The options of `init` about buckets, and about the run to join. This module imports no torch, as rules.py."""

    bucket: str | None = None
    """Keep the run in a bucket: NAME, s3://NAME/PREFIX or https://ENDPOINT/NAME/PREFIX."""
    provider: Literal["aws", "r2", "minio"] = "aws"
    """Whose service the bucket is in."""
    region: str = ""
    """Of the bucket. Default: us-east-1; auto on R2."""
    url: str = ""
    """Where everybody reads the bucket. Default: the service's own URL; R2 has none."""
    readers: tuple[str, ...] = ()
    """A principal that may read; without any, everybody may."""
    days: int = Field(default=7, ge=1)
    """Days for which objects of closed windows are kept."""
    join: str | None = None
    """Take part in the run whose manifest is there, instead of making one."""
    meeting: str | None = None
    """With --join: the bucket in which participants announce themselves."""
    name: str = "miner-1"
    """With --join: the node's name."""
