"""Studies of the solver and baselines on real data sets that are available offline."""
