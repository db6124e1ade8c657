"""Types of columns: how each is inferred, fitted and encoded as features."""

#: Names of the column types that users may set.
COLUMN_TYPES = ("number", "category", "date", "text", "picture")
