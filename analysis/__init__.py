"""Studies of the library: ``python -m analysis`` lists them, ``python -m analysis NAME`` runs one.

Each study prints a table, and writes it where it is asked to; those of the README are in ``results/``.
"""
