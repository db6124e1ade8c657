"""What README and the guides promise, measured on the present code."""
