"""Study of the time and memory of the solver."""
