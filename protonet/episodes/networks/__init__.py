"""Networks that episodes embed rows with, what is trained beside them, and their files."""
