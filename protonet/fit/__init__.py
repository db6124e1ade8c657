"""From loaders to a network, and what is known of it: one step per file.

Rows: `loading`, `duplicates`, `training_set`, and those without a label, `label_validation` and `unlabelled`.
Choice: `search`, weighed by the learned `prior`. Network: `networks`. All of it: `solver`.
Evaluation on unseen rows: `crossfit`, `learning`. Active learning: `active`.
"""
