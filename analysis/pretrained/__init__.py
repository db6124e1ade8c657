"""Studies of text and picture embeddings and of class names, on a user's own data sets."""
