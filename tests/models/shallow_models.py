"""Models of every family with few blocks, for tests."""

import timm
from torch import nn

# One block per stage is the same code as eighteen; windows have two kinds, in the last stage.
SHALLOW = {
    "deit": {"depth": 2},
    "pvt": {"depths": (1, 1, 1, 1)},
    "swin": {"depths": (1, 1, 1, 2)},
    "cswin": {"depths": (1, 1, 1, 1)},
}


def family_of(name: str) -> str:
    return name.split("_")[1]


def create(name: str, **arguments) -> nn.Module:
    """A shallow model in eval mode, with weights large enough for errors to show."""
    model = timm.create_model(name, **({"num_classes": 7} | SHALLOW[family_of(name)] | arguments)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model
