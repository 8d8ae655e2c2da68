"""What runs inside the sandbox, with the standard library alone; it is mounted there by itself, without the rest of the
program.
"""
