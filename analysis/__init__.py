"""Studies of the library: ``python -m analysis`` lists them, ``python -m analysis NAME`` runs one.

Each study prints a table, and writes it to files on request; the tables of the README are in ``results/``.
"""
