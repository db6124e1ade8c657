"""Training of the tabular transformer on synthetic and real tables."""
