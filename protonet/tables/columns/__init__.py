"""What the columns of a table hold, and how each becomes numbers."""

#: The kinds that a person may name.
NAMES = ("number", "category", "date", "text", "picture")
