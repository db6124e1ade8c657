"""Meta-training by the command beside plain loops."""
