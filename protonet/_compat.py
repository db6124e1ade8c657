"""Functions of torch that the oldest supported release, 2.2, lacks or has in another form.

All other modules use only what every supported release has; `tests/test_torch_names.py` checks this.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

#: Whether `torch.compile` or `torch.export` traces the code. Before torch 2.3, code cannot find out.
is_compiling = getattr(torch.compiler, "is_compiling", lambda: False)


def disable_autocast(device: str) -> AbstractContextManager[object]:
    """Return a context without autocast on a device type, such as "cuda"; also on device types without autocast.

    The context does nothing if autocast is off, because exported graphs would otherwise contain it.
    """
    is_available = getattr(torch.amp, "is_autocast_available", None)
    if is_available is not None:
        enabled = is_available(device) and torch.is_autocast_enabled(device)
    else:  # before torch 2.4, `torch.is_autocast_enabled` takes no argument and is that of CUDA
        enabled = torch.is_autocast_cpu_enabled() if device == "cpu" else torch.is_autocast_enabled()
    return torch.autocast(device, enabled=False) if enabled else nullcontext()
