"""Tests of roles/node/change_reporter.py."""

from roles.node.change_reporter import ChangeReporter
from roles.ports import StoreError
from tests.support.simulation.network import Log


def reported_errors(log: Log) -> list[str]:
    return [fields["error"] for fields in log.named("read-failed")]


def test_an_error_is_reported_again_only_when_its_text_changes_or_after_a_success():
    log = Log("node")
    reporter = ChangeReporter(log, "read-failed", path="a/b")
    for text in ("away", "away", "full", "away"):
        reporter.failure(StoreError(text))
    reporter.success()
    reporter.failure(StoreError("away"))
    assert reported_errors(log) == ["away", "full", "away", "away"]
    assert all(fields["path"] == "a/b" for fields in log.named("read-failed"))


def test_even_an_error_without_text_is_reported_errors():
    log = Log("node")
    ChangeReporter(log, "read-failed").failure(StoreError())
    assert reported_errors(log) == [""]


def test_no_more_than_the_maximum_of_reports_until_a_success():
    log = Log("node")
    reporter = ChangeReporter(log, "read-failed", max_reports=2)
    for number in range(5):
        reporter.failure(StoreError(f"error {number}"))
    reporter.success()
    reporter.failure(StoreError("error 5"))
    assert reported_errors(log) == ["error 0", "error 1", "error 5"]
