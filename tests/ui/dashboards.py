"""A dashboard on this machine's loopback over an invented run, of which a test changes what is read next."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from grailnode.cli.actions.run_dashboard import Dashboard, View
from grailnode.node.http_server import serve_http
from tests.support.builders.observed_runs import NOW, observed_run

HOSTILE = [
    "<script>window.acted=1</script>",
    "</script><script>window.acted=1</script>",
    "<img src=x onerror=window.acted=1>",
    "<svg onload=window.acted=1>",
    "<svg><script>window.acted=1</script></svg>",
    "</title><script>window.acted=1</script>",
    "</style><script>window.acted=1</script>",
    "</pre><iframe srcdoc='<script>parent.acted=1</script>'>",
    "<iframe src=javascript:parent.acted=1>",
    "<a href=javascript:window.acted=1>earn more</a>",
    "javascript:window.acted=1",
    "data:text/html,<script>window.acted=1</script>",
    '"><script>window.acted=1</script>',
    "'><script>window.acted=1</script>",
    '" onmouseover="window.acted=1',
    "' onmouseover='window.acted=1",
    "` onmouseover=`window.acted=1",
    '" autofocus onfocus=window.acted=1 x="',
    "<details open ontoggle=window.acted=1>",
    "<body onload=window.acted=1>",
    "<base href=//evil.example/>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<style>body{display:none}</style>",
    "<form action=//evil.example><button>send</button></form>",
    "<object data=//evil.example></object>",
    "<math><mtext></p><script>window.acted=1</script>",
    "<template><script>window.acted=1</script></template>",
    '<noscript><p title="</noscript><img src=x onerror=window.acted=1>">',
    "<!--<img src=x onerror=window.acted=1>-->",
    "--><script>window.acted=1</script>",
    "<![CDATA[<script>window.acted=1</script>]]>",
    "<?xml version='1.0'?><script>window.acted=1</script>",
    "&lt;script&gt;window.acted=1&lt;/script&gt;",
    "&#60;script&#62;window.acted=1&#60;/script&#62;",
    "&amp;&quot;&apos;&unknown;&#x0;",
    "\\u003cscript\\u003ewindow.acted=1\\u003c/script\\u003e",
    "${window.acted=1}{{window.acted=1}}$title$$content",
    "\N{FULLWIDTH LESS-THAN SIGN}script\N{FULLWIDTH GREATER-THAN SIGN}",
    "%3Cscript%3Ewindow.acted=1%3C/script%3E",
    'data: {"sections": {}}\n\nid: 9999999999999\n\n',
    "\r\n\r\nHTTP/1.1 200 OK\r\n\r\n<script>window.acted=1</script>",
    "\x1b[31mred\x1b[0m \x07\x08\x00",
    "\N{RIGHT-TO-LEFT OVERRIDE}desrever \N{POP DIRECTIONAL FORMATTING}\N{ZERO WIDTH SPACE}",
    "\ufeff\ufffe\uffff\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}",
    "Z" + "\N{COMBINING ACUTE ACCENT}" * 400,
    "W" * 30_000,
    "\N{PILE OF POO}" * 500,
    "-" * 200 + " " * 200,
    "\N{FULLWIDTH LATIN CAPITAL LETTER A}\t" * 300,
]


class Source:
    """What a dashboard reads: `view`, which a test replaces; it counts the readings.

    Attributes:
        time: of the dashboard's clock.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.readings = 0
        self.time = NOW

    def now(self) -> float:
        return self.time

    async def read(self) -> View:
        self.readings += 1
        return self.view

    def change(self, **fields: Any) -> None:
        """Let the next reading find another state."""
        self.view = replace(self.view, state=replace(self.view.state, **fields))


@asynccontextmanager
async def serving(source: Source) -> AsyncIterator[str]:
    """Serve a dashboard; yields its address when it has read the run."""
    page = Dashboard(source.view.state.run_name, source.read, 0.05, source.now)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(page.keep_new)
        (listener,) = await nursery.start(partial(serve_http, connections=100), "127.0.0.1", 0, page.respond)
        with trio.fail_after(60):
            while source.readings < 2:
                await trio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}/"
        nursery.cancel_scope.cancel()


def usual() -> Source:
    """Return a run with six miners after 60 windows."""
    return Source(observed_run())
