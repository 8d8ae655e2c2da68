"""What people see: the terminal and the report page, both drawn from one state of a run. Imports observe and run."""
