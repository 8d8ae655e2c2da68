"""The tables of report and dashboard: miners, sites, digests, and the numbers behind the plots."""

from collections.abc import Mapping, Sequence

from grailnode.observe.state import JudgedWindow, MinerRow, SiteRow, ValidatorRow
from grailnode.ui.formatting import byte_text, clean, decimal_text, part_text, share_text
from grailnode.ui.report.markup import Child, Markup, element, join, number
from grailnode.ui.report_data import DemoReport, RunFigures, reference_digest
from grailnode.ui.series import by_count


def miners(report: RunFigures, recent: Mapping[str, Sequence[JudgedWindow]] | None = None) -> Markup:
    """Return a table of the miners and the judgements on their groups; with `recent`, their newest windows by key, also
    their scores and these.
    """
    heads = (
        ("miner", ""),
        ("key", "wide"),
        *((("kind", "wide"),) if recent is None else (("score", "n"), ("newest windows", ""))),
        ("submitted", "n wide"),
        ("accepted", "n"),
        ("rejected", "n"),
        ("not judged", "n wide"),
        ("why", ""),
    )
    rows = [
        participant(
            miner,
            miner.rejected,
            *(
                [element("td", miner.kind, class_=f"{miner.kind} wide")]
                if recent is None
                else history(f"{miner.score:.3f}", recent.get(miner.key, ()))
            ),
            element("td", f"{miner.submitted:,}", class_="n wide"),
            element("td", f"{miner.accepted:,}", class_="n"),
            element("td", f"{miner.rejections:,}", class_="n"),
            element("td", f"{miner.unjudged:,}", class_="n wide"),
        )
        for miner in report.groups
    ]
    return table(heads, rows, "No miner took part.")


def history(figure: str, windows: Sequence[JudgedWindow]) -> list[Markup]:
    """Return the cells of a figure and of bars for the newest windows: accepted groups, and rejected ones below."""
    most = max((item.accepted + item.rejected for item in windows), default=0) or 1
    shapes = {"ok": "", "bad": ""}
    for place, item in enumerate(windows):
        top = 16.0
        for css, count in (("bad", item.rejected), ("ok", item.accepted)):
            if count:
                height = number(16 * count / most)
                shapes[css] += f"M{4 * place} {number(top)}v-{height}h3v{height}z"
                top -= 16 * count / most
    sums = sum(item.accepted for item in windows), sum(item.rejected for item in windows)
    words = f"newest {len(windows)} windows: {sums[0]:,} accepted, {sums[1]:,} rejected"
    bars = [element("path", class_=css, d=shape) for css, shape in shapes.items() if shape]
    label = element("title", words)
    return [
        element("td", figure, class_="n"),
        element("td", element("svg", label, *bars, viewBox="0 0 160 16", role="img", class_="strip")),
    ]


def sites(report: RunFigures) -> Markup:
    """Return the section on the sites that trained together; nothing where the trainer trained alone."""
    if not report.sites:
        return Markup("")
    numbers = ("rounds", "steps", "groups", "sent")
    heads = (("site", ""), ("key", "wide"), *((name, "n") for name in numbers), ("refused", ""))
    rows = [
        participant(
            site,
            site.refused,
            *(element("td", f"{value:,}", class_="n") for value in (site.rounds, site.steps, site.groups)),
            element("td", byte_text(site.payload_bytes), class_="n"),
        )
        for site in report.sites
    ]
    return join([element("section", element("h2", "Sites"), table(heads, rows, "")), Markup("")], "\n")


def participant(row: MinerRow | SiteRow | ValidatorRow, refusals: Mapping[str, int] | None, *cells: Markup) -> Markup:
    """Return a row with name, key, some cells, and the reasons of what was refused, if something can be."""
    why = (
        None
        if refusals is None
        else ", ".join(f"{clean(reason, 32)} {count:,}" for reason, count in by_count(refusals)) or "-"
    )
    return element(
        "tr",
        element("td", clean(row.name, 40), class_="name"),
        element("td", element("code", row.key[:8] or "-", title=row.key), class_="wide"),
        *cells,
        None if refusals is None else element("td", why, class_="why"),
    )


def digests(report: DemoReport) -> Markup:
    """Return a table of the weights digests of all nodes at the end, each marked as equal to the trainer's or not."""
    reference = reference_digest(report)
    rows = [
        element(
            "tr",
            element("td", clean(node, 40), class_="name"),
            element("td", digest or "-", class_="hex"),
            element("td", "✓ equal", class_="equal")
            if digest == reference
            else element("td", "✗ differs", class_="unequal"),
        )
        for node, digest in report.weights_digest.items()
    ]
    return table(
        (("node", ""), ("BLAKE3 of its weights", ""), ("same bits", "")), rows, "No node reported its weights."
    )


def data(report: DemoReport) -> Markup:
    """Return every plotted value as text, in tables that are folded."""
    columns = {"held-out pass@1": report.pass_at_1, "reward": report.reward}
    if report.pass_at > 1:
        columns[f"held-out pass@{report.pass_at}"] = report.pass_at_k
    windows = [
        number_row(str(window), *(decimal_text(value, 3) for value in values))
        for window, *values in zip(report.window_index, *columns.values(), strict=True)
    ]
    versions = [
        number_row(
            str(version),
            "-" if size is None else byte_text(size),
            "-" if size is None else part_text(size, report.full_bytes),
            "-" if share is None else share_text(share),
        )
        for version, size, share in zip(report.version_index, report.patch_bytes, report.sparsity, strict=True)
    ]
    by_window = table(tuple((name, "n") for name in ("window", *columns)), windows, "No window was judged.")
    heads = ("version", "n"), ("patch", "n"), ("of the full checkpoint", "n"), ("sparsity", "n")
    by_version = table(heads, versions, "No version was published.")
    parts = [
        element("details", element("summary", f"By window ({len(windows):,})"), by_window),
        element("details", element("summary", f"By policy version ({len(versions):,})"), by_version),
    ]
    if report.rounds:
        parts.append(element("details", element("summary", f"By round ({len(report.rounds):,})"), rounds(report)))
    return join(parts)


def rounds(report: RunFigures) -> Markup:
    """Return a table of the rounds of sites."""
    rows = [
        number_row(
            str(item.number),
            str(item.version),
            f"{item.counted} of {item.sites}",
            *(f"{value:,}" for value in (item.local_steps, item.groups)),
            byte_text(item.payload_bytes),
        )
        for item in report.rounds
    ]
    names = ("round", "version", "contributions", "local steps", "groups", "sent")
    return table(tuple((name, "n") for name in names), rows, "")


def table(heads: tuple[tuple[str, str], ...], rows: list[Markup], empty: str) -> Markup:
    """Return a table that scrolls sideways on narrow screens; a sentence instead of an empty one."""
    if not rows:
        return element("p", empty, class_="aside")
    head = element("tr", *(element("th", name, class_=css or None, scope="col") for name, css in heads))
    return element("div", element("table", element("thead", head), element("tbody", *rows)), class_="scroll")


def number_row(*cells: Child) -> Markup:
    return element("tr", *(element("td", cell, class_="n") for cell in cells))
