"""Evaluations: plans, scores of episodes, statistics, comparisons and reports."""
