"""The optimizer bench: how many steps an optimizer needs to reach what tuned AdamW reaches."""
