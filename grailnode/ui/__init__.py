"""What people see: the terminal and the report page. What both show is formatted and computed here, once: numbers
(formatting), series over windows and versions and tallies of judged groups (series) and the record of a finished run
(report_data). Imports convert, observe, calibration and run.
"""
