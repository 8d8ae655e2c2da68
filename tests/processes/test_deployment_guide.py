"""docs/deploy.md: its commands lead to a verified window of strangers."""

from pathlib import Path

from tests.support.processes.deployment import follow_page, make_deployment


def test_the_page_leads_to_a_verified_window(tmp_path: Path) -> None:
    stages: list[str] = []
    with make_deployment(tmp_path) as deployment:
        follow_page(deployment, stages.append)
    assert stages[-1] == "roots changed"
