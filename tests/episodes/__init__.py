"""Tests of protonet.episodes."""
