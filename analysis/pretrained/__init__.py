"""Studies of pretrained encoders of texts, pictures and class names, on a user's own data sets."""
