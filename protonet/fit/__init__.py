"""From loaders to a network: what is switched on, and its fit."""
