"""Kinds of episodes: numbered draws, their protocols and presets, and the batches of rows that methods see."""
