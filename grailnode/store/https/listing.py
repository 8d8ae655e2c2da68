"""S3's ListObjectsV2 over anonymous HTTPS, as a public bucket answers it: hostile XML in, keys and sizes out."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, urlencode
from xml.parsers import expat

import httpx
import trio

from grailnode.store.names import is_path
from grailnode.store.permanent_error import PermanentError
from protocol.limits import MIB
from roles.ports import ObjectInfo, StoreError

MAX_PAGE_BYTES: Final = 8 * MIB
"""A listing page of 1,000 keys has at most some 3 MiB of XML."""

_PAGE_SECONDS: Final = 60.0
_EMPTY_PAGES: Final = 8  # in a row that say there is more to come
_MAX_DEPTH: Final = 8
_MAX_TEXT: Final = 4096


class ListingError(Exception):
    """Not a page of a listing."""


@dataclass
class Page:
    """One page.

    Attributes:
        objects: (key, size in bytes) as the page gives them, in its order.
        truncated: whether it promises more; token: what asks for it.
    """

    objects: list[tuple[str, int]] = field(default_factory=list)
    truncated: bool = False
    token: str = ""


class _Reader:
    """Follows the elements of a page."""

    def __init__(self) -> None:
        self.page = Page()
        self._open: list[str] = []
        self._text = ""
        self._key = ""
        self._size = 0

    def begin(self, name: str, _: object) -> None:
        self._open.append(name)
        self._text = ""
        if len(self._open) > _MAX_DEPTH or self._open[0] != "ListBucketResult":
            raise ListingError("another document")
        if name == "Contents":
            self._key, self._size = "", 0

    def text(self, text: str) -> None:
        self._text += text
        if len(self._text) > _MAX_TEXT:
            raise ListingError("an endless text")

    def end(self, name: str) -> None:
        place = self._open[1:]
        if place == ["Contents", "Key"]:
            self._key = self._text
        elif place == ["Contents", "Size"]:
            if not (self._text.isascii() and self._text.isdecimal() and len(self._text) < 19):
                raise ListingError("a size that is no number")
            self._size = int(self._text)
        elif place == ["Contents"]:
            self.page.objects.append((self._key, self._size))
        elif place == ["IsTruncated"]:
            self.page.truncated = self._text == "true"
        elif place == ["NextContinuationToken"]:
            self.page.token = self._text
        self._open.pop()
        self._text = ""


def read_page(data: bytes) -> Page:
    """Read a page.

    Raises:
        ListingError: it is none.
    """

    def refuse(*_: object) -> None:
        raise ListingError("a document type")

    reader = _Reader()
    parser = expat.ParserCreate("UTF-8")
    parser.StartElementHandler = reader.begin
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError) as error:
        raise ListingError(str(error)) from error
    return reader.page


async def list_bucket(client: httpx.AsyncClient, base: str, prefix: str, after: str) -> AsyncIterator[ObjectInfo]:
    """Objects below a prefix that sort behind `after`, page by page.

    Args:
        base: the bucket's root URL, '/' at its end.

    Raises:
        RefusedError: no bucket that lists in public is there.
        StoreError: no answer, or pages that run backwards or have no end.
    """
    where = base + prefix
    asked = {"list-type": "2", "prefix": prefix} | ({"start-after": after} if after else {})
    latest, empty = "", 0
    while True:
        page = await _fetch(client, f"{base}?{urlencode(asked, quote_via=quote)}", where)
        for key, size in page.objects:
            if key <= latest:
                raise StoreError(f"{where}: the listing runs backwards at {key[:80]!r}")
            latest = key
            if key > after and key.startswith(prefix) and is_path(key):
                yield ObjectInfo(key, size)
        if not page.truncated:
            return
        given = any(key.startswith(prefix) and (key <= after or is_path(key)) for key, _ in page.objects)
        empty = 0 if given else empty + 1
        if empty > _EMPTY_PAGES or not page.token:
            raise StoreError(f"{where}: the listing promises more and gives nothing")
        asked = {"list-type": "2", "prefix": prefix, "continuation-token": page.token}


async def _fetch(client: httpx.AsyncClient, url: str, where: str) -> Page:
    data = bytearray()
    try:
        with trio.fail_after(_PAGE_SECONDS):
            async with client.stream("GET", url) as answer:
                status = answer.status_code
                if status == 429 or status >= 500:
                    raise StoreError(f"{where}: the server answered {status}")
                if status != 200:
                    raise PermanentError(f"{where}: cannot be listed (the server answered {status})")
                async for piece in answer.aiter_raw():
                    data += piece
                    if len(data) > MAX_PAGE_BYTES:
                        raise StoreError(f"{where}: a page of more than {MAX_PAGE_BYTES} bytes")
        return read_page(bytes(data))
    except ListingError as error:
        raise PermanentError(f"{where}: cannot be listed ({error})") from error
    except trio.TooSlowError as error:
        raise StoreError(f"{where}: no page of the listing within {_PAGE_SECONDS:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise StoreError(f"{where}: {' '.join(str(error).split())[:300] or type(error).__name__}") from error
