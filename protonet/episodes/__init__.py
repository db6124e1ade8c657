"""Few-shot experiments: episodes, methods, evaluation."""
