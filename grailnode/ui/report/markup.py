"""HTML and SVG elements that are safe against injection: all text that is not `Markup` is escaped when it is put in."""

from html import escape

from grailnode.ui.formatting import clean

_LONGEST_ATTRIBUTE = 1 << 20  # a path through many thousands of points
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_VOID = frozenset({"br", "meta", "hr", "input"})


class Markup(str):
    """Text that is HTML already. Only this module and trusted templates construct it."""

    __slots__ = ()


Child = Markup | str | None


def element(name: str, *children: Child, **attributes: str | float | None) -> Markup:
    """Return one element. Children that are plain strings are cleaned and escaped; None is left out, as a child and as
    an attribute.

    A trailing underscore of an attribute's name is dropped (`class_`), other underscores become hyphens
    (`stroke_width`). Numbers are written with two decimals at most, so that the same data gives the same bytes.
    """
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(text(child) for child in children if child is not None)
    if not inside and name in _VOID:
        return Markup(f"<{name}{attribute_text}>")
    return Markup(f"<{name}{attribute_text}>{inside}</{name}>")


def text(child: Markup | str) -> Markup:
    """Clean and escape a plain string; return markup as it is."""
    return child if isinstance(child, Markup) else Markup(escape(clean(child, cells=4096)))


def prose(words: str) -> Markup:
    """Escape a stranger's text of several lines; characters that are not printable become U+FFFD."""
    lines = words.replace("\t", "    ").split("\n")
    return Markup(escape("\n".join("".join(c if c.isprintable() else _REPLACEMENT for c in line) for line in lines)))


def join(parts: list[Markup], between: str = "") -> Markup:
    """Concatenate elements."""
    return Markup(between.join(parts))


def number(value: float) -> str:
    """Write a coordinate: two decimals at most, no trailing zeros, never '-0'."""
    rounded = round(value, 2)
    return f"{rounded + 0.0:.2f}".rstrip("0").rstrip(".")


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return escape(clean(value, cells=_LONGEST_ATTRIBUTE), quote=True)
    return number(value)
