"""The record of a finished run that people keep: report.json for programs, report.html for people."""

from grailnode.ui.report.write import read_report, write_report
from grailnode.ui.report_data import DemoReport, MinerGroups, RunFacts, TokensPerSecond

__all__ = ["DemoReport", "MinerGroups", "RunFacts", "TokensPerSecond", "read_report", "write_report"]
