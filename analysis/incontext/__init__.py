"""The transformer behind context views: made and real tables, and its training on them."""
