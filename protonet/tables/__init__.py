"""Read tables, infer column types, encode columns as features, and warn about suspicious columns."""

#: Default name of the label column.
DEFAULT_LABEL_COLUMN = "label"
