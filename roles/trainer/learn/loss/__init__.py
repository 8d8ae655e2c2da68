"""Losses of policy optimization as pure functions of tensors: the formula, and the objective of a token that it names.
Imports torch alone.

Shapes: N tokens of the C completions of a batch, one completion behind another; R rollouts of one group; V vocabulary.
"""
