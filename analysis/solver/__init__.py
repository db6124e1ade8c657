"""Studies of the solver: its time and memory, and fits with redundant columns."""
