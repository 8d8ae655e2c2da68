"""A learner whose masters lie on several ranks. Rank 0 has the training loop; the others follow its broadcasts."""
