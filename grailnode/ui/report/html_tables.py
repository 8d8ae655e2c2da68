"""The tables of report.html: miners, sites, digests, and the numbers behind the plots."""

from collections.abc import Mapping

from grailnode.observe.state import MinerRow, SiteRow
from grailnode.ui.formatting import byte_text, clean, decimal_text, part_text, share_text
from grailnode.ui.report.markup import Child, Markup, element, join
from grailnode.ui.report_data import DemoReport, reference_digest
from grailnode.ui.series import by_count


def miners(report: DemoReport) -> Markup:
    """Return a table of the miners and the judgements on their groups."""
    heads = (
        ("miner", ""),
        ("key", "wide"),
        ("kind", "wide"),
        ("submitted", "n wide"),
        ("accepted", "n"),
        ("rejected", "n"),
        ("not judged", "n wide"),
        ("why", ""),
    )
    rows = [
        _participant(
            miner,
            miner.rejected,
            element("td", miner.kind, class_=f"{miner.kind} wide"),
            element("td", f"{miner.submitted:,}", class_="n wide"),
            element("td", f"{miner.accepted:,}", class_="n"),
            element("td", f"{miner.rejections:,}", class_="n"),
            element("td", f"{miner.unjudged:,}", class_="n wide"),
        )
        for miner in report.groups
    ]
    return _table(heads, rows, "No miner took part.")


def sites(report: DemoReport) -> Markup:
    """Return the section on the sites that trained together; nothing where the trainer trained alone."""
    if not report.sites:
        return Markup("")
    numbers = ("rounds", "steps", "groups", "sent")
    heads = (("site", ""), ("key", "wide"), *((name, "n") for name in numbers), ("refused", ""))
    rows = [
        _participant(
            site,
            site.refused,
            *(element("td", f"{value:,}", class_="n") for value in (site.rounds, site.steps, site.groups)),
            element("td", byte_text(site.payload_bytes), class_="n"),
        )
        for site in report.sites
    ]
    return join([element("section", element("h2", "Sites"), _table(heads, rows, "")), Markup("")], "\n")


def _participant(row: MinerRow | SiteRow, refusals: Mapping[str, int], *cells: Markup) -> Markup:
    """Return a row with name, key, some cells, and the reasons of what was refused."""
    why = ", ".join(f"{clean(reason, 32)} {count:,}" for reason, count in by_count(refusals))
    return element(
        "tr",
        element("td", clean(row.name, 40), class_="name"),
        element("td", element("code", row.key[:8] or "-", title=row.key), class_="wide"),
        *cells,
        element("td", why or "-", class_="why"),
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
    return _table(
        (("node", ""), ("BLAKE3 of its weights", ""), ("same bits", "")), rows, "No node reported its weights."
    )


def data(report: DemoReport) -> Markup:
    """Return every plotted value as text, in tables that are folded."""
    columns = {"held-out pass@1": report.pass_at_1, "reward": report.reward}
    if report.pass_at > 1:
        columns[f"held-out pass@{report.pass_at}"] = report.pass_at_k
    windows = [
        _row(str(window), *(decimal_text(value, 3) for value in values))
        for window, *values in zip(report.window_index, *columns.values(), strict=True)
    ]
    versions = [
        _row(
            str(version),
            "-" if size is None else byte_text(size),
            "-" if size is None else part_text(size, report.full_bytes),
            "-" if share is None else share_text(share),
        )
        for version, size, share in zip(report.version_index, report.patch_bytes, report.sparsity, strict=True)
    ]
    by_window = _table(tuple((name, "n") for name in ("window", *columns)), windows, "No window was judged.")
    heads = ("version", "n"), ("patch", "n"), ("of the full checkpoint", "n"), ("sparsity", "n")
    by_version = _table(heads, versions, "No version was published.")
    parts = [
        element("details", element("summary", f"By window ({len(windows):,})"), by_window),
        element("details", element("summary", f"By policy version ({len(versions):,})"), by_version),
    ]
    if report.rounds:
        parts.append(element("details", element("summary", f"By round ({len(report.rounds):,})"), _rounds(report)))
    return join(parts)


def _rounds(report: DemoReport) -> Markup:
    rows = [
        _row(
            str(item.number),
            str(item.version),
            f"{item.counted} of {item.sites}",
            *(f"{value:,}" for value in (item.local_steps, item.groups)),
            byte_text(item.payload_bytes),
        )
        for item in report.rounds
    ]
    names = ("round", "version", "contributions", "local steps", "groups", "sent")
    return _table(tuple((name, "n") for name in names), rows, "")


def _table(heads: tuple[tuple[str, str], ...], rows: list[Markup], empty: str) -> Markup:
    """Return a table that scrolls sideways on narrow screens; a sentence instead of an empty one."""
    if not rows:
        return element("p", empty, class_="aside")
    head = element("tr", *(element("th", name, class_=css or None, scope="col") for name, css in heads))
    return element("div", element("table", element("thead", head), element("tbody", *rows)), class_="scroll")


def _row(*cells: Child) -> Markup:
    return element("tr", *(element("td", cell, class_="n") for cell in cells))
