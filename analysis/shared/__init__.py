"""What the studies share: the runner, the journal, tables, and one registry of baselines."""
