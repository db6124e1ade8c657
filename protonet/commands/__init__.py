"""The commands of ``python -m protonet``.

`protonet.commands.arguments` parses the command line without importing torch. A function in the file of the command
then executes it, given the parsed options.
"""
