"""Read tables, infer column types, encode columns as features, and warn about suspicious columns."""
