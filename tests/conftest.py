"""Settings shared by all tests."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)  # the matrices are small: two threads cost more than they bring
settings.register_profile("protonet", deadline=None, derandomize=True)
settings.load_profile("protonet")
