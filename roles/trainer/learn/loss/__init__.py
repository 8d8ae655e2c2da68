"""Losses of policy optimization as pure functions of tensors, one file for each factor of the formula. Imports torch
alone.

Shapes: N tokens of the C completions of a batch, one completion behind another; R rollouts of one group; V vocabulary.
"""
