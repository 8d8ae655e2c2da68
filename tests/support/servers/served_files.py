"""A correct static file server, with ranges and If-Range, for the loopback server."""

import hashlib
import re
from urllib.parse import unquote

from tests.support.servers.loopback import HttpRequest, Reply


class FileServer:
    """Serves objects.

    Attributes:
        objects: by URL path.
        requests: all requests so far.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[HttpRequest] = []

    def answer(self, request: HttpRequest) -> Reply:
        self.requests.append(request)
        data = self.objects.get(unquote(request.target.partition("?")[0]))
        if data is None:
            return Reply(404, b"no")
        etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        headers = {"ETag": etag, "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if match is None or request.headers.get("if-range", etag) != etag:
            return Reply(200, data, headers)
        start, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
        if start >= len(data):
            return Reply(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
        return Reply(206, data[start : last + 1], headers)
