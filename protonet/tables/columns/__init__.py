"""Columns of a table: their types and how each becomes features."""

#: The column types that users may name.
COLUMN_TYPES = ("number", "category", "date", "text", "picture")
