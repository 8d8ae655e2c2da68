"""Lists a public bucket with S3's ListObjectsV2 over anonymous HTTPS. The XML in the responses may be hostile."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, urlencode
from xml.parsers import expat

import httpx
import trio

from grailnode.store.checks import PageCheck, PermanentError, one_line
from protocol.limits import MIB
from roles.ports import ObjectInfo, StoreError

MAX_PAGE_BYTES: Final = 8 * MIB
"""A listing page of 1,000 keys has at most some 3 MiB of XML."""

_PAGE_SECONDS: Final = 60.0
_MAX_DEPTH: Final = 8
_MAX_TEXT_CHARACTERS: Final = 4096  # of one element


class ListingError(Exception):
    """A document is not a page of a listing."""


@dataclass
class Page:
    """One page of a listing, filled by the events of an XML parser."""

    objects: list[tuple[str, int]] = field(default_factory=list)  # (key, size in bytes), in the order of the page
    truncated: bool = False
    token: str = ""  # requests the next page
    _open: list[str] = field(default_factory=list)
    _text: str = ""
    _key: str = ""
    _size: int = 0

    def begin(self, name: str, _: object) -> None:
        self._open.append(name)
        self._text = ""
        if len(self._open) > _MAX_DEPTH or self._open[0] != "ListBucketResult":
            raise ListingError("the document is not a ListBucketResult, or too deep")
        if name == "Contents":
            self._key, self._size = "", 0

    def text(self, text: str) -> None:
        self._text += text
        if len(self._text) > _MAX_TEXT_CHARACTERS:
            raise ListingError("an element with too long a text")

    def end(self, name: str) -> None:
        place = self._open[1:]
        if place == ["Contents", "Key"]:
            self._key = self._text
        elif place == ["Contents", "Size"]:
            if not (self._text.isascii() and self._text.isdecimal() and len(self._text) < 19):
                raise ListingError("a size is not a number")
            self._size = int(self._text)
        elif place == ["Contents"]:
            self.objects.append((self._key, self._size))
        elif place == ["IsTruncated"]:
            self.truncated = self._text == "true"
        elif place == ["NextContinuationToken"]:
            self.token = self._text
        self._open.pop()
        self._text = ""


def read_page(data: bytes) -> Page:

    def refuse(*_: object) -> None:
        raise ListingError("the document has a document type declaration")

    page = Page()
    parser = expat.ParserCreate("UTF-8")
    parser.StartElementHandler = page.begin
    parser.EndElementHandler = page.end
    parser.CharacterDataHandler = page.text
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError) as error:
        raise ListingError(str(error)) from error
    return page


async def list_bucket(client: httpx.AsyncClient, base: str, prefix: str, after: str) -> AsyncIterator[ObjectInfo]:
    """Yield the objects below a prefix whose paths sort after `after`, page by page, from a bucket's root URL with '/'
    at its end; StoreError if there is no response, or the listing is out of order or does not end.
    """
    where = base + prefix
    query = {"list-type": "2", "prefix": prefix} | ({"start-after": after} if after else {})
    check = PageCheck(where, prefix, after)
    while True:
        page = await _fetch(client, f"{base}?{urlencode(query, quote_via=quote)}", where)
        for info in check.objects(page.objects):
            yield info
        if not page.truncated:
            return
        check.check_progress()
        if not page.token:
            raise StoreError(f"{where}: the listing announces more pages, but does not say how to request them")
        query = {"list-type": "2", "prefix": prefix, "continuation-token": page.token}


async def _fetch(client: httpx.AsyncClient, url: str, where: str) -> Page:
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
        return read_page(bytes(data))
    except ListingError as error:
        raise PermanentError(f"{where}: cannot be listed ({error})") from error
    except trio.TooSlowError as error:
        raise StoreError(f"{where}: no page of the listing within {_PAGE_SECONDS:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise StoreError(f"{where}: {one_line(error)}") from error
