"""Tests of protonet.datasets."""
