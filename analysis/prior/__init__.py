"""Training of the weighting prior, a small network that weights views, on measured tasks."""
