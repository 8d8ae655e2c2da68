"""The page that report and dashboard share, and the content of report.html, a single file that needs neither network
nor scripts. Layout and style are in page.html, report.html and style.css.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from string import Template

from grailnode.ui.formatting import byte_text, clean, duration_words, part_text, rate_text, share_text
from grailnode.ui.report.charts import groups, learning, patches, sparsity
from grailnode.ui.report.html_tables import data, digests, miners, sites
from grailnode.ui.report.markup import Markup, element, join, text
from grailnode.ui.report_data import DemoReport, Findings, judgement_text, trainer_wait_text
from grailnode.ui.series import Change


def page(report: DemoReport) -> str:
    """Return the whole page. The same report gives the same text."""
    findings = Findings.of(report)
    name = run_title(report.run_name)
    figures = [plot(report, findings) for plot in (learning, patches, sparsity, groups)]
    content = Template(asset("report.html")).substitute(
        heading=text(name),
        lead=text(lead(report, findings)),
        facts=_facts(report),
        tiles=_tiles(report, findings),
        figures=join(figures, "\n"),
        miners=miners(report),
        sites=sites(report),
        digests=digests(report),
        about_sites=_about_sites(report),
        verify_command=_command(report.verify_command),
        command=_command(report.command),
        data=data(report),
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    style = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>\n{asset("style.css")}</style>'
    return shell(f"{name} · grailnode report", style, content)


def run_title(run_name: str) -> str:
    """Return the name of a run as a title."""
    return clean(run_name, 60) or "unnamed run"


def shell(title: str, style: str, content: str) -> str:
    """Return a whole page.

    Args:
        style: the elements that bring style, and what else stands in its head.
        content: of <main>.
    """
    return Template(asset("page.html")).substitute(title=text(title), style=style, content=content)


@cache
def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return files("grailnode.ui.report").joinpath(name).read_text(encoding="utf-8")


def lead(report: DemoReport, findings: Findings) -> str:
    """Say in a few sentences what happened in this run."""
    sentences = []
    span = f"{_number(report.windows, 'window')} and {duration_words(report.seconds)}"
    if (change := findings.pass_at_1) is not None:
        way = f"{'rose' if change.gain > 0 else 'fell'} from {change.first:.2f} to" if change.gain else "stayed at"
        sentences.append(f"In {span}, held-out pass@1 {way} {change.last:.2f}.")
    else:
        sentences.append(f"The run lasted {span}; held-out pass@1 was not measured.")
    sentences.append(judgement_text(report, findings))
    if findings.nodes > 1 and findings.equal_nodes == findings.nodes:
        sentences.append(f"All {findings.nodes} nodes ended with the same weights, bit for bit.")
    elif findings.nodes > 1:
        sentences.append(f"Only {findings.equal_nodes} of {findings.nodes} nodes ended with the same weights.")
    return " ".join(sentence for sentence in sentences if sentence)


def _facts(report: DemoReport) -> Markup:
    """Return the facts that identify the run."""
    entries = [
        ("run", element("code", report.run_id[:16] or "-", title=report.run_id)),
        ("environment", text(clean(report.environment, 40))),
        ("model", text(f"{report.model_parameters:,} parameters")),
        ("seed", text(str(report.seed))),
        ("versions published", text(f"{report.versions:,}")),
        ("sites", text(f"{len(report.sites)}, {_number(len(report.rounds), 'round')}"))
        if report.sites
        else ("trainer waited", text(trainer_wait_text(report))),
        ("duration", text(duration_words(report.seconds))),
    ]
    return fact_list(entries)


def fact_list(entries: Iterable[tuple[str, Markup]]) -> Markup:
    """Return facts of (name, value)."""
    pairs = [element("div", element("dt", name), element("dd", value)) for name, value in entries]
    return element("dl", *pairs, class_="facts")


def _tiles(report: DemoReport, findings: Findings) -> Markup:
    """Return the tiles at the top: (name, figure, explanation)."""
    patch = "-", "none was published"
    if (size := findings.patch_bytes) is not None:
        full = byte_text(report.full_bytes)
        patch = byte_text(size), f"{part_text(size, report.full_bytes)} of the full {full}"
    sparsity_figure = share_text(findings.sparsity) if findings.sparsity is not None else "-"
    reasons = _number(len(findings.groups.reasons), "reason")
    equal_nodes = f"{findings.equal_nodes} of {findings.nodes}" if findings.nodes else "-"
    speed = report.tokens_per_second
    tiles = [
        change_tile("held-out pass@1", findings.pass_at_1, "by a validator"),
        change_tile("mean reward", findings.reward, "verified rollouts"),
        ("median patch", *patch),
        ("mean sparsity", sparsity_figure, "weights unchanged by a version"),
        ("groups verified", f"{findings.groups.accepted:,}", f"of {findings.groups.judged:,} judged"),
        ("groups rejected", f"{findings.groups.rejected:,}", f"{reasons}, see below"),
        ("equal weights", equal_nodes, "nodes hold the trainer's bits"),
        ("tokens a second", rate_text(speed.generated), f"generated; {rate_text(speed.verified)} verified"),
    ]
    return tile_list(tiles)


def tile_list(tiles: Sequence[tuple[str, str, str]]) -> Markup:
    """Return tiles of (name, figure, explanation)."""
    items = [element("li", element("span", a), element("b", b), element("small", c)) for a, b, c in tiles]
    return element("ul", *items, class_="tiles")


def change_tile(name: str, change: Change | None, note: str) -> tuple[str, str, str]:
    """Return the tile of a figure that changes over the run."""
    if change is None:
        return name, "-", "not measured"
    return name, change.ends_text, f"{change.gain:+.2f}, {note}"


def _about_sites(report: DemoReport) -> Markup:
    """Explain the table of sites, where there are some."""
    if not report.sites:
        return Markup("")
    words = (
        "Each site takes local steps on the verified groups that are dealt to it, and publishes what changed. A signed "
        "round manifest says which contributions count; all sites then have the same FP32 weights."
    )
    return join([element("dt", "Sites"), element("dd", words), Markup("")], "\n")


def _command(line: str) -> Markup:
    """Return a command line that breaks between its words only, never inside a flag."""
    return element("pre", join([element("span", word) for word in line.split()], " "))


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
