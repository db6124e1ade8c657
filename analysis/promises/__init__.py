"""Figures that README and the guides promise, measured on the present code."""
