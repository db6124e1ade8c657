"""Features of pictures: decoding of files, fixed descriptors, and pretrained networks."""

#: Preprocessing settings that a network's metadata, or the user, may specify.
SETTINGS = ("size", "mean", "std")
