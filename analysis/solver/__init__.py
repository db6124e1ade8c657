"""Studies of the solver: its cost, and the coverage of its intervals."""
