"""Models of every kind of attention, small enough to write all weights out."""

import torch
from torch import nn

from inline_attention import create_model

DEIT = {"embed_dim": 16, "num_heads": 2, "depth": 2, "patch_size": 4, "img_size": 20, "num_classes": 3}
SWIN = {
    "embed_dim": 8,
    "num_heads": (2, 2, 2, 2),
    "depths": (2, 2, 1, 1),
    "global_blocks": (1, 0, 0, 0),
    "window_size": 3,
    "num_classes": 3,
}
CSWIN = {"embed_dim": 8, "num_heads": (2, 2, 2, 2), "depths": (1, 1, 1, 1), "global_stages": 1, "num_classes": 3}
ARGUMENTS = {"deit": DEIT, "pvt": {"depths": (1, 1, 1, 1), "num_classes": 3}, "swin": SWIN, "cswin": CSWIN}


def small_model(name: str, **arguments):
    """A model with weights large enough for attention to be far from uniform."""
    torch.manual_seed(3)
    model = create_model(name, **(ARGUMENTS[name.split("_")[1]] | arguments)).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.weight.normal_(std=0.3)
            if hasattr(module, "relative_position_bias_table"):
                module.relative_position_bias_table.normal_()
    return model
