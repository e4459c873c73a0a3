"""The least model that has everything a checkpoint can get wrong, and comparisons to the bit."""

import torch
from torch import nn


class Classifier(nn.Module):
    """Two layers, a buffer and a head."""

    def __init__(self, num_classes: int = 10, dim: int = 4):
        super().__init__()
        self.embed = nn.Linear(3, dim)
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("steps", torch.tensor(7))
        self.head = nn.Linear(dim, num_classes) if num_classes else nn.Identity()


def assert_same(first, second):
    """Equal names, dtypes, shapes and bits."""
    assert set(first) == set(second)
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert value.shape == second[name].shape, name
        left, right = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (value, second[name]))
        assert torch.equal(left, right), name


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}
