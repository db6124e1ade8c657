"""User interface that commands and few-shot experiments share: argument parsers, text tables and HTML pages."""
