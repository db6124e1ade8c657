"""Modules of version 0.1 that have another name now: importing one says which. They go with version 0.3."""
