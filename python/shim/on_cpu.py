"""FlashAttention's tests where there is no GPU: what they put on "cuda" is in the CPU's memory and is
computed there."""

import torch
from torch.overrides import TorchFunctionMode


def _here(value):
    kind = getattr(value, "type", value) if isinstance(value, (str, torch.device)) else None
    return "cpu" if isinstance(kind, str) and kind.split(":")[0] == "cuda" else value


class OnCpu(TorchFunctionMode):
    """Every "cuda" among the arguments of torch's functions is "cpu"."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = {name: _here(value) for name, value in (options or {}).items()}
        if function is torch.Tensor.cuda:
            return arguments[0]
        return function(*map(_here, arguments), **options)


def begin():
    """Switches this on for the process. The tests ask for the GPU's architecture: they get the one that most
    of them are for."""
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: type("Properties", (), {"total_memory": 1 << 33})
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    OnCpu().__enter__()
