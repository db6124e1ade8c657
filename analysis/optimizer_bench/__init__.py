"""The optimizer benchmark: the number of steps that an optimizer needs to reach the loss of tuned AdamW."""
