"""Tests of the types of columns."""
