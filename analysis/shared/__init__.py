"""Shared code of the studies: the runner, the journal, tables, and one registry of baselines."""
