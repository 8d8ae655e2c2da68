"""The training process: replay buffer, loss, optimizer. Imports the spool and verified batches."""
