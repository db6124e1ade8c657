"""Studies of the commands for a person's own file."""
