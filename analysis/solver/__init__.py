"""Studies of the solver: what it costs, and what its training recipe is worth."""
