"""Views of the features, one kind a file."""
