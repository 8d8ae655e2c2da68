"""New buckets at an S3 service on loopback."""

import secrets

from grailnode.store.s3.s3_session import S3Credentials, S3Location, S3Session

CREDENTIALS = S3Credentials("loopback-access", "loopback-secret")

Bucket = tuple[S3Location, S3Credentials]


def new_bucket(url: str, connections: int) -> Bucket:
    """Create a bucket with a random name, and return its location and the credentials that may write to it."""
    location = S3Location(f"b{secrets.token_hex(6)}", url, addressing="path", connections=connections)
    session = S3Session(location, CREDENTIALS)
    session.client.create_bucket(Bucket=location.bucket)
    session.close()
    return location, CREDENTIALS
