"""Tests of the few-shot methods."""
