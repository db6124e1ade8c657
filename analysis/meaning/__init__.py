"""Studies of what texts, pictures and names of classes mean, on a person's own sets."""
