"""How far honest computations of one policy differ, and the thresholds that follow (`grailnode calibrate`).

`variants` says in which ways honest nodes compute differently, `pairs` lets one of them check another and streams what
the check sees, `measure` makes thresholds of it, `separation` tries them on quantized copies, `proof_file` keeps them.
"""
