"""The report in the browser: one file without network, whose figures are those of ``--json``."""
