"""report.json round-trips; report.html needs no other file, and no stranger's text can act in it."""

import json
import re
import tomllib
from base64 import b64encode
from dataclasses import asdict, replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import pytest
from pydantic import ValidationError

from grailnode.observe.state import NetworkState
from grailnode.ui.report.page import page, write_report
from grailnode.ui.report_data import DemoReport
from tests.ui import runs
from tests.ui.runs import Tags

STATES = {
    "usual": runs.network(),
    "empty": runs.empty(),
    "one": runs.network(windows=1),
    "two": runs.network(windows=2),
    "hundreds": runs.network(windows=700, strangers=40),
    "hostile": runs.hostile(),
    "sites": runs.many_sites(),
    "hostile sites": runs.many_sites(name=runs.HOSTILE),
}


@pytest.mark.parametrize("state", [runs.network(), runs.many_sites()], ids=["alone", "sites"])
def test_a_report_comes_back_and_has_the_state_that_status_prints_and_sites_if_there_are_some(
    tmp_path: Path, state: NetworkState
):
    report = runs.report(state)
    as_json, as_html = write_report(report, tmp_path / "new" / "directory")
    assert DemoReport.model_validate_json(as_json.read_bytes()) == report
    assert json.loads(as_json.read_text())["state"] == json.loads(json.dumps(asdict(state)))
    assert as_html.read_text("utf-8") == page(report)
    assert ("<h2>Sites</h2>" in page(report)) == bool(state.sites)
    assert {file.name for file in as_json.parent.iterdir()} == {"report.json", "report.html"}


@pytest.mark.parametrize(("change", "fault"), [({"seconds": float("nan")}, "finite"), ({"second": 1.0}, "unexpected")])
def test_a_state_that_no_run_has_is_refused(change: dict[str, float], fault: str):
    report = runs.report().model_dump()
    with pytest.raises(ValidationError, match=fault):
        DemoReport.model_validate(report | {"state": report["state"] | change})


@pytest.mark.parametrize("name", STATES)
def test_page_needs_no_network_and_runs_only_its_own_scripts(name: str):
    check = "grailnode verify --run out/run.toml"
    html = page(runs.report(STATES[name], command=runs.HOSTILE, environment=runs.HOSTILE, verify_command=check))
    assert check in re.sub(r"</?span>", "", html)
    assert "&lt;script&gt;" in html and not {"\x1b", "\u202e", "\r"} & set(html)
    assert set(re.findall(r"https?://[^\"'\s<]+", html)) <= {"https://github.com/leeoniya/uPlot"}
    assert not re.search(r"@import|url\(", html)
    tags = Tags(html)
    assert tags.open == []
    assert not {"link", "img", "iframe"} & set(tags.names)
    assert not [key for key, _ in tags.attributes if key.startswith("on") or key in {"href", "src", "style"}]
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    hashes = [f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts]
    assert len(scripts) == tags.names.count("script") == 2
    assert f'; script-src {" ".join(hashes)}">' in html


@pytest.mark.parametrize("name", STATES)
def test_every_plot_has_its_figures_in_words_and_columns_of_one_length(name: str):
    attributes = Tags(page(runs.report(STATES[name]))).attributes
    words = [value for key, value in attributes if key == "aria-label" and value != "Plots"]
    plots = [json.loads(value or "") for key, value in attributes if key == "data-plot"]
    assert len(words) == 3
    assert len(plots) == {"empty": 0, "one": 1}.get(name, 3)
    for plot in plots:
        assert len(plot["columns"]) == len(plot["names"]) == len(plot["colours"]) + 1
        assert len({len(column) for column in plot["columns"]}) == 1
        assert len(plot["columns"][0]) <= 400


def test_a_plot_of_many_windows_shows_means_up_to_the_newest():
    attributes = Tags(page(runs.report(STATES["hundreds"]))).attributes
    plot = next(json.loads(value or "") for key, value in attributes if key == "data-plot")
    windows, rewards = plot["columns"][0], plot["columns"][2]
    assert windows == list(range(1, 700, 2))
    assert rewards[:2] == pytest.approx([0.405, 0.425])
    assert rewards[-1] == pytest.approx(0.7)


def test_the_chart_library_is_the_published_one_and_its_licence_is_packaged():
    vendor = files("grailnode.ui.report").joinpath("vendor")
    published = {  # of uplot 1.6.32 in the npm registry
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    assert {name: sha256(vendor.joinpath(name).read_bytes()).hexdigest() for name in published} == published
    assert "The MIT License (MIT)" in vendor.joinpath("uPlot.LICENSE").read_text()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "grailnode/ui/report/vendor/*.LICENSE" in project["project"]["license-files"]
    assert "ui/report/vendor/*" in project["tool"]["setuptools"]["package-data"]["grailnode"]


def test_groups_that_nobody_judged_have_a_word_and_a_legend():
    miner = replace(runs.network().miners[0], submitted=192, accepted=0, rejected={"copied": 12})
    text = page(runs.report(replace(runs.network(), miners=(miner,)), trainer_data_wait_fraction=0.84))
    assert "0 accepted, 12 rejected, 180 not judged" in text
    assert '<i class="open"></i><span>not judged</span><b>180</b>' in text
    assert "84% for data; trainer and miners share this machine" in text


def test_a_differing_digest_is_marked():
    digests = {"trainer": "5d" * 32, "miner-1": "5d" * 32, "miner-2": "00" * 32}
    html = page(runs.report(weights_digest=digests))
    assert html.count("✓ equal") == 2
    assert html.count("✗ differs") == 1
    assert "Only 2 of 3 nodes ended with the same weights." in html


def test_page_praises_verification_only_if_it_is_true():
    state = runs.network()
    praise = "Every judged group of a cheating miner was rejected"
    assert praise in page(runs.report(state))
    honest = replace(state.miners[0], rejected={"sketch": 1})
    assert praise not in page(runs.report(replace(state, miners=(honest, *state.miners[1:]))))


def test_a_demo_without_a_judged_group_says_what_to_do():
    state = runs.network()
    silent = tuple(replace(miner, accepted=0, rejected={}) for miner in state.miners)
    assert "No group was judged in time" in page(runs.report(replace(state, miners=silent)))
    assert "No group was judged in time" not in page(runs.report(state))


def test_a_failed_write_does_not_damage_the_older_report(tmp_path: Path):
    (tmp_path / "report.json").mkdir()  # cannot be renamed over
    with pytest.raises(OSError, match=r"report\.json"):
        write_report(runs.report(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
