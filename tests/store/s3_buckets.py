"""New buckets at an S3 service on loopback, and the pages that a false one answers."""

import secrets

from grailnode.store.place import PlaceSection
from grailnode.store.s3.s3_session import S3Credentials, S3Session

CREDENTIALS = S3Credentials("loopback-access", "loopback-secret")

Bucket = tuple[PlaceSection, S3Credentials]


def new_bucket(url: str, connections: int) -> Bucket:
    """Create a bucket with a random name, and return its place and the credentials that may write to it."""
    name = f"b{secrets.token_hex(6)}"
    place = PlaceSection(kind="s3", bucket=name, endpoint=url, addressing="path", concurrency=connections)
    session = S3Session(place, CREDENTIALS)
    session.client.create_bucket(Bucket=name)
    session.close()
    return place, CREDENTIALS


def listing_page(*keys: str, token: str = "", is_truncated: bool = False) -> bytes:
    """Return a page of a listing, which announces another one by its token."""
    contents = "".join(f"<Contents><Key>{key}</Key><Size>3</Size></Contents>" for key in keys)
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    flag = f"<IsTruncated>{str(is_truncated or bool(token)).lower()}</IsTruncated>"
    head = '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    return f"{head}{flag}{contents}{more}</ListBucketResult>".encode()
