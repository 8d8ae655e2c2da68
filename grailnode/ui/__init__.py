"""What people see: the terminal and the report page. What both show is formatted and computed here, once: numbers
(formatting), and the record of a finished run with its figures (report_data). Imports convert, observe, calibration and
run.
"""
