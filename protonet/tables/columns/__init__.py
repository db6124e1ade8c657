"""What the columns of a table hold, and how each becomes numbers."""
