"""Samplers of few-shot episodes: protocols that draw numbered episodes, options, and the batches that methods get."""
