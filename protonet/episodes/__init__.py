"""Few-shot experiments: episodes, methods, evaluation and meta-training.

Evaluation, from below: `draws` numbers episodes, `batch` gathers their rows, `methods` classify them, `evaluation`
scores the methods, `state` keeps the scores, `statistics` compares them, `report` writes the result, and `experiment`
is the whole evaluation.
Meta-training: `backbones` are trained on the `tasks` by the loop in `meta`, with `checkpoints`; `train` is the command.
"""
