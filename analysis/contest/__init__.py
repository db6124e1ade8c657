"""The contest: its trial, new draws of its data, and what can be reached on them."""
