"""The commands of ``python -m protonet``.

`protonet.commands.arguments` parses the command line without importing torch. A function of the file of the command
then does the work, given the parsed options.
"""
