"""The commands of ``python -m protonet``, one per file.

What they are asked is read in `arguments`, without torch; each then gets its options, and does its work.
"""
