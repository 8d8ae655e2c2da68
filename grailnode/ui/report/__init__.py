"""The record of a finished run that people keep: report.json for programs, report.html for people."""

from grailnode.ui.report.write import write_report
from grailnode.ui.report_data import DemoReport, RunFacts

__all__ = ["DemoReport", "RunFacts", "write_report"]
