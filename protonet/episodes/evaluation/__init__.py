"""Evaluation of few-shot methods: settings, scores of episodes, statistics, comparisons and reports."""
