"""Meta-training of encoders: objectives, training and validation episodes, the training loop and its command."""
