"""How much memory operations ask for."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestResult(TorchDispatchMode):
    """Notes how many elements the largest tensor has that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result
