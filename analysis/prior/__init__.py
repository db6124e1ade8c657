"""Weighting prior: tasks, evidence on the views of each task, and the small network that is trained on it."""
