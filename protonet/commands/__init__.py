"""The commands of ``python -m protonet``, one per file."""
