"""Studies of pictures."""
