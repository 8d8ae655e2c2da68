"""Experiment trackers: curves and samples of a trainer in TensorBoard, Weights & Biases or Trackio."""
