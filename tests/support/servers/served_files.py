"""What an honest static file server answers, ranges and If-Range included."""

import hashlib
import re
from urllib.parse import unquote

from tests.support.servers.loopback import Asked, Reply


class FileServer:
    """Objects by URL path.

    Attributes:
        objects: what is served.
        asked: every request so far.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: list[Asked] = []

    def answer(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        data = self.objects.get(unquote(asked.target.partition("?")[0]))
        if data is None:
            return Reply(404, b"no")
        etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        headers = {"ETag": etag, "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked.headers.get("range", ""))
        if match is None or asked.headers.get("if-range", etag) != etag:
            return Reply(200, data, headers)
        start, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
        if start >= len(data):
            return Reply(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
        return Reply(206, data[start : last + 1], headers)
