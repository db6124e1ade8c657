"""Tests of the kinds of columns."""
