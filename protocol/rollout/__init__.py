"""Rollouts: challenge, seed-bound sampling, sketch, and the batch that contains them. Imports identity and kernels."""
