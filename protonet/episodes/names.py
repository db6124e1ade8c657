"""Names and limits that commands check before torch is imported."""

EVALUATE_PROG = "protonet.episodes"
TRAIN_PROG = f"{EVALUATE_PROG} train"
COMPARE_PROG = f"{EVALUATE_PROG} compare"
EXTRACT_PROG = f"{EVALUATE_PROG} extract"
PAPER_PROG = f"{EVALUATE_PROG} paper"
MAX_COUNT = 10**6  #: The largest number of classes, and of rows per class: far beyond any use, far below any overflow.
BACKBONES = ("mlp", "conv", "conv4", "resnet12")
OBJECTIVES = ("prototypes", "protonet", "feat", "maml", "anil")
#: Initial weights of the last layer of MAML and ANIL: learned weights of each class, or zero.
HEAD_KINDS = ("classes", "zero")
