"""Studies of the library: each prints a table and can draw its figure."""
