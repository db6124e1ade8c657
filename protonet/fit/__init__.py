"""From data loaders to a fitted network: one step per file.

Rows: `training_set`, `duplicates`.

Selection of views: `search`, with weights by the pretrained network in `prior`. Fit: `networks`. All steps: `solver`.

Evaluation on held-out rows: `cross_validation`, `diagnostics`. Active learning: `active`.
"""
