"""Studies on real data that can be had offline."""
