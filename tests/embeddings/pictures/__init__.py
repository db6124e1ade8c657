"""Tests of pictures as features."""
