"""Meta-training: objectives, the tasks they learn from, the loop and its command."""
