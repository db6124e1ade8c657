"""Studies of few-shot episodes."""
