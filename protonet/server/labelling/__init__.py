"""The labelling page: its files, the session that fits a network to the labels, and its HTTP API."""
