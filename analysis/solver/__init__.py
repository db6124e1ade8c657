"""The study of the solver's time and memory."""
