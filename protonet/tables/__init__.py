"""Read tables, infer column types, encode columns as features, and warn about suspicious columns."""

#: The default name of the column of the labels.
DEFAULT_LABEL = "label"
