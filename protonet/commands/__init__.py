"""The commands of ``python -m protonet``, one per file.

`protonet.commands.arguments` parses the command line without importing torch. The function ``run`` in the file of the
command then does the work, given the parsed options.
"""
