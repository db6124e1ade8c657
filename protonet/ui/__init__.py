"""Command-line parsers, plots, and the HTML page of commands and episodes."""
