"""Samplers of few-shot episodes: protocols that draw numbered episodes, presets, and the batches that methods get."""
