"""Pretrained text and image encoders, and a cache of their embeddings. Weights are read from the disk only."""
