"""Features of pictures: decoding of files, fixed descriptors, and pretrained networks."""
