"""The commands of ``python -m protonet``, one a file."""
