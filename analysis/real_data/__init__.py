"""Studies on real data sets that are available offline."""
