"""Model selection from held-out rows: folds, temperature, weights of views, the one-standard-error rule."""
