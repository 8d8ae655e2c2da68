"""What people see: the terminal and the report page. What both show is formatted and computed here, once: numbers
(formatting), series over windows and versions (series), tallies of judged groups (tallies) and the record of a finished
run (report_data, findings). Imports convert, observe, calibration and run.
"""
