"""The templates of report and dashboard. They are safe against injection: all text that is not `Markup` is cleaned and
escaped when it is put in.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from grailnode.observe.state import JudgedWindow
from grailnode.ui import formatting
from grailnode.ui.report_data import by_count
from protocol.encoding import content_digest

_LONGEST_TEXT: Final = 4096  # cells
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
CHART_SCRIPTS: Final = ("vendor/uPlot.iife.min.js", "charts.js")
ASSETS: Final = ("vendor/uPlot.min.css", "style.css", *CHART_SCRIPTS, "dashboard.js")
"""The files that the dashboard asks for, in the order in which they are loaded."""
_LATEST: Final = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
_STRIP: Final = 16  # height of the bars of windows


def number(value: float) -> str:
    """Write a coordinate: two decimals at most, no trailing zeros, never '-0': the same data gives the same bytes."""
    return f"{round(value, 2) + 0.0:.2f}".rstrip("0").rstrip(".")


def _prose(words: str) -> Markup:
    """Escape a stranger's text of several lines; characters that are not printable become U+FFFD."""
    lines = words.replace("\t", "    ").split("\n")
    return escape("\n".join("".join(c if c.isprintable() else _REPLACEMENT for c in line) for line in lines))


def counted(count: int, noun: str) -> str:
    """Write '1 round' or '1,234 rounds'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _time(moment: float | None) -> str:
    """Return a moment, which the page's script replaces by how long ago it is."""
    if moment is None:
        return "never"
    at = min(moment, _LATEST)
    words = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time data-at="{:.3f}">{}</time>').format(at, words)


def _bars(windows: Sequence[JudgedWindow]) -> list[tuple[str, Markup]]:
    """Return class and path of the bars of windows: accepted groups, and rejected ones below."""
    most = max((item.accepted + item.rejected for item in windows), default=0) or 1
    shapes = {"ok": Markup(""), "bad": Markup("")}
    for place, item in enumerate(windows):
        top = float(_STRIP)
        for css, count in (("bad", item.rejected), ("ok", item.accepted)):
            if count:
                height = number(_STRIP * count / most)
                shapes[css] += f"M{4 * place} {number(top)}v-{height}h3v{height}z"
                top -= _STRIP * count / most
    return [(css, shape) for css, shape in shapes.items() if shape]


def _put_in(value: Any) -> Any:
    """Return what stands in a page for a value; strings are escaped behind this."""
    if isinstance(value, float):
        return number(value)
    return formatting.clean(value, _LONGEST_TEXT) if type(value) is str else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("grailnode.ui.report", "."),
        autoescape=True,
        finalize=_put_in,
        undefined=StrictUndefined,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ("byte_text", "byte_part_text", "clean", "decimal_text", "duration_words", "part_text", "share_text")
    environment.filters |= {name: getattr(formatting, name) for name in (*names, "rate_text")}
    environment.filters |= {"by_count": by_count, "counted": counted, "thousands": "{:,}".format}
    environment.filters |= {"bars": _bars, "prose": _prose, "time": _time}
    for name in environment.list_templates(extensions=["html"]):
        environment.get_template(name)
    return environment


def load() -> None:
    """Read all templates, for a process that may have no free file descriptor later."""
    _environment()


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(values)


def part(template: str, macro: str, *values: Any, **more: Any) -> Markup:
    """Return a part of a page, which a macro of a template writes."""
    module: Any = _environment().get_template(template).module
    return Markup(getattr(module, macro)(*values, **more).strip())  # noqa: S704 - the macro has escaped its values


@cache
def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return files("grailnode.ui.report").joinpath(name).read_text(encoding="utf-8")


@cache
def asset_urls() -> dict[str, str]:
    """Return the names of the files of `ASSETS` by their relative URLs, which contain the digest of what is in them, so
    that a browser may keep them.
    """
    return {f"{name}?{content_digest(asset(name).encode()).hex()[:16]}": name for name in ASSETS}
