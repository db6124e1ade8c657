"""The commands of ``python -m protonet``, one per file.

`arguments` parses the command line without importing torch. Each command's ``run`` then takes the parsed options.
"""
