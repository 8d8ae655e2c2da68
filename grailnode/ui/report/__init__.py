"""The record of a finished run that people keep: report.json for programs, report.html for people."""

from grailnode.ui.report.write import write_report
from grailnode.ui.report_data import DemoReport, MinerGroups, RunFacts, TokensPerSecond

__all__ = ["DemoReport", "MinerGroups", "RunFacts", "TokensPerSecond", "write_report"]
