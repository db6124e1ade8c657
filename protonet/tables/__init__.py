"""A person's table."""
