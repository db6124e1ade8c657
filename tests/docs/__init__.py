"""Tests of README, the guide and the settings of the site."""
