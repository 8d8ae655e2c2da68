"""Losses of policy optimization as pure functions of tensors: the formula, and the objective of a token that it names.
Imports torch alone. They are written by hand: TRL has them as methods of its trainers, and verl in a package that needs
its configuration and Ray.

Shapes: N tokens of the C completions of a batch, one completion behind another; R rollouts of one group; V vocabulary.
"""
