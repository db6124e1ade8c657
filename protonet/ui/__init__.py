"""What commands and episodes show with: the command line's manners, plots, the page."""
