"""The record of a run that people keep: report.json for programs, report.html for eyes."""

from grailnode.ui.report.report_data import DemoReport, MinerGroups, RunFacts, TokensPerSecond
from grailnode.ui.report.write import read_report, write_report

__all__ = ["DemoReport", "MinerGroups", "RunFacts", "TokensPerSecond", "read_report", "write_report"]
