"""The record of a finished run that people keep: report.json for programs, report.html for people."""
