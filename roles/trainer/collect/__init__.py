"""The download process: from verdicts to verified batches for the learner. Imports the spool and verified batches."""
