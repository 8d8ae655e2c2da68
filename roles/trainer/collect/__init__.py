"""The download process: verdicts in, verified groups for the learner out. Imports the spool and verified batches."""
