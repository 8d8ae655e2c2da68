"""What a rollout must be: challenge, seed-bound sampling, sketch, and the batch that carries it. Imports identity and
kernels.
"""
