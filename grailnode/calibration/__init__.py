"""Measures how far honest computations of one policy differ, and chooses thresholds (`grailnode calibrate`). Imports
engine.

`variants` lists the ways in which honest nodes compute differently. `pairs` generates in one way, checks in another and
yields measurements. `thresholds` chooses thresholds from them, `procedure` tests these on quantized copies, and
`proof_file` reads and writes the result.
"""
