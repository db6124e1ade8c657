"""From loaders to a network, and what is known of it: one step per file.

Rows: `loading`, `copies`, `problem`, and those without a label, `marks` and `unlabelled`.
Choice: `search`, weighed by the learned `prior`. Network: `networks`. All of it: `solver`.
How it does on rows that it has not seen: `crossfit`, `learning`. What to label next: `active`.
"""
