"""Networks that embed the rows of episodes, heads that are trained with the networks, and their files."""
