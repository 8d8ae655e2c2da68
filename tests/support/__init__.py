"""What two rooms of tests, or tests and benches, share. It imports nothing else of tests/, and nothing of bench/."""
