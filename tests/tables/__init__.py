"""Tests: an oracle, a property and an error for every public function."""
