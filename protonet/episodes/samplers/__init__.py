"""Samplers of few-shot episodes, their command-line options, and the batches of episodes that methods get."""
