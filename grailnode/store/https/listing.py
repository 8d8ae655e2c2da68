"""Lists a public bucket with S3's ListObjectsV2 over anonymous HTTPS. The XML in the responses may be hostile."""

from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import quote, urlencode
from xml.etree import ElementTree

import httpx
import trio

from grailnode.store.checks import PageCheck, PermanentError, one_line
from protocol.limits import MIB
from roles.ports import ObjectInfo, StoreError

MAX_PAGE_BYTES: Final = 4 * MIB
"""A listing page of 1,000 keys has at most some 3 MiB of XML."""

_PAGE_SECONDS: Final = 60.0


class ListingError(Exception):
    """A document is not a page of a listing."""


def read_page(data: bytes) -> tuple[list[tuple[str, int]], bool, str]:
    """Return the keys and sizes of a page, whether more pages follow, and the token that requests the next one."""
    if b"<!DOCTYPE" in data:  # in keys, '<' is written as an entity
        raise ListingError("the document has a document type declaration")
    try:
        root = ElementTree.fromstring(data, ElementTree.XMLParser(encoding="UTF-8"))  # noqa: S314 -- no entities
    except (ElementTree.ParseError, ValueError) as error:
        raise ListingError(str(error)) from error
    if root.tag.rpartition("}")[2] != "ListBucketResult":
        raise ListingError("the document is not a ListBucketResult")
    objects = []
    for entry in root.iterfind("{*}Contents"):
        size = entry.findtext("{*}Size", "0")
        if not (size.isascii() and size.isdecimal() and len(size) < 19):
            raise ListingError("a size is not a number")
        objects.append((entry.findtext("{*}Key", ""), int(size)))
    return objects, root.findtext("{*}IsTruncated") == "true", root.findtext("{*}NextContinuationToken", "")


async def list_bucket(client: httpx.AsyncClient, base: str, prefix: str, after: str) -> AsyncIterator[ObjectInfo]:
    """Yield the objects below a prefix whose paths sort after `after`, page by page, from a bucket's root URL with '/'
    at its end; StoreError if there is no response, or the listing is out of order or does not end.
    """
    where = base + prefix
    query = {"list-type": "2", "prefix": prefix} | ({"start-after": after} if after else {})
    check = PageCheck(where, prefix, after)
    while True:
        try:
            objects, is_truncated, token = read_page(
                await _fetch(client, f"{base}?{urlencode(query, quote_via=quote)}", where)
            )
        except ListingError as error:
            raise PermanentError(f"{where}: cannot be listed ({error})") from error
        for info in check.objects(objects):
            yield info
        if not is_truncated:
            return
        check.check_progress()
        if not token:
            raise StoreError(f"{where}: the listing announces more pages, but does not say how to request them")
        query = {"list-type": "2", "prefix": prefix, "continuation-token": token}


async def _fetch(client: httpx.AsyncClient, url: str, where: str) -> bytes:
    data = bytearray()
    try:
        with trio.fail_after(_PAGE_SECONDS):
            async with client.stream("GET", url) as response:
                status = response.status_code
                if status == 429 or status >= 500:
                    raise StoreError(f"{where}: the server answered {status}")
                if status != 200:
                    raise PermanentError(f"{where}: cannot be listed (the server answered {status})")
                async for piece in response.aiter_raw():
                    data += piece
                    if len(data) > MAX_PAGE_BYTES:
                        raise StoreError(f"{where}: a page of more than {MAX_PAGE_BYTES} bytes")
        return bytes(data)
    except trio.TooSlowError as error:
        raise StoreError(f"{where}: no page of the listing within {_PAGE_SECONDS:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise StoreError(f"{where}: {one_line(error)}") from error
