"""RandAugment (Cubuk et al., 2019) for whole batches, in the words of timm's descriptions such as rand-m9-mstd0.5-inc1.

Operations, strengths and probabilities are timm's; images are resampled bilinearly. Every layer of a policy consists of
one warp, one blend and one table of values, of which at most one does something to a given image.

Shapes: `N` samples of a dataset, `B` batch, `C` channels, `H`, `W` height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from timm.data.auto_augment import rand_augment_transform
from torch import Tensor

from inline_attention.data.on_device.colours import Blend, Table, blend, replace_values
from inline_attention.data.on_device.step import Step
from inline_attention.data.on_device.warping import warp

LARGEST_MAGNITUDE = 10.0
# Not empty: of an empty one, some versions of timm keep what one description says for the next.
TIMM_OPTIONS = {"img_mean": (0, 0, 0)}


class _Strength(NamedTuple):
    """How strongly an operation is done to each sample: `[N]` from 0 to 1, or more if a description allows, and ±1."""

    level: Tensor
    sign: Tensor

    @property
    def signed(self) -> Tensor:
        return self.level * self.sign

    @property
    def factor(self) -> Tensor:
        """Of a blend, from 0.1 to 1.9."""
        return 0.1 + 1.8 * self.level

    @property
    def increasing_factor(self) -> Tensor:
        """Of a blend: the stronger, the further from 1, on either side."""
        return (1 + 0.9 * self.signed).clamp(min=0.1)


Argument = Callable[[_Strength], Tensor]
_BLEND_KINDS = {
    "Brightness": Blend.BRIGHTNESS,
    "Contrast": Blend.CONTRAST,
    "Color": Blend.COLOUR,
    "Sharpness": Blend.SHARPNESS,
}
_BLENDS: dict[str, tuple[Blend, Argument]] = {
    **{name: (kind, lambda strength: strength.factor) for name, kind in _BLEND_KINDS.items()},
    **{f"{name}Increasing": (kind, lambda strength: strength.increasing_factor) for name, kind in _BLEND_KINDS.items()},
}


def _without_low_bits(count: Tensor) -> Tensor:
    """A mask that keeps the `count` highest of eight bits."""
    return 256 - 2.0 ** (8 - count.clamp(0, 8))


_TABLES: dict[str, tuple[Table, Argument]] = {
    "AutoContrast": (Table.AUTO_CONTRAST, lambda strength: torch.zeros_like(strength.level)),
    "Equalize": (Table.EQUALISE, lambda strength: torch.zeros_like(strength.level)),
    "Invert": (Table.SOLARISE, lambda strength: torch.zeros_like(strength.level)),
    "Posterize": (Table.POSTERISE, lambda strength: _without_low_bits((4 * strength.level).floor())),
    "PosterizeIncreasing": (Table.POSTERISE, lambda strength: _without_low_bits(4 - (4 * strength.level).floor())),
    "Solarize": (Table.SOLARISE, lambda strength: (256 * strength.level).floor()),
    "SolarizeIncreasing": (Table.SOLARISE, lambda strength: 256 - (256 * strength.level).floor()),
    "SolarizeAdd": (Table.SOLARISE_ADD, lambda strength: (110 * strength.level).floor().clamp(max=128)),
}


def _matrix(*entries: Tensor | float) -> Tensor:
    """`[N, 6]` of entries of which some are `[N]`, the others the same for all."""
    some = next(entry for entry in entries if isinstance(entry, Tensor))
    return torch.stack([entry if isinstance(entry, Tensor) else torch.full_like(some, entry) for entry in entries], 1)


def _rotation(strength: _Strength, size: tuple[int, int]) -> Tensor:
    """Counter-clockwise about the centre, up to 30 degrees."""
    angle = -math.radians(30) * strength.signed
    centre_y, centre_x = size[0] / 2, size[1] / 2
    cos, sin = angle.cos(), angle.sin()
    return _matrix(
        cos, sin, centre_x - cos * centre_x - sin * centre_y, -sin, cos, centre_y + sin * centre_x - cos * centre_y
    )


_WARPS: dict[str, Callable[[_Strength, tuple[int, int]], Tensor]] = {
    "Rotate": _rotation,
    "ShearX": lambda strength, _: _matrix(1.0, 0.3 * strength.signed, 0.0, 0.0, 1.0, 0.0),
    "ShearY": lambda strength, _: _matrix(1.0, 0.0, 0.0, 0.3 * strength.signed, 1.0, 0.0),
    "TranslateXRel": lambda strength, size: _matrix(1.0, 0.0, 0.45 * size[1] * strength.signed, 0.0, 1.0, 0.0),
    "TranslateYRel": lambda strength, size: _matrix(1.0, 0.0, 0.0, 0.0, 1.0, 0.45 * size[0] * strength.signed),
}


class _Plan(NamedTuple):
    """What a layer does to each sample: the columns of its part of the plan.

    Attributes:
        is_warped: `[N]` 1 or 0.
        matrices: `[N, 6]` as for `warp`.
        blends: `[N]` of `Blend`, or 0.
        factors: `[N]` of the blends.
        tables: `[N]` of `Table`, or 0.
        arguments: `[N]` of the tables.
    """

    is_warped: Tensor
    matrices: Tensor
    blends: Tensor
    factors: Tensor
    tables: Tensor
    arguments: Tensor

    @classmethod
    def unpacked(cls, columns: Tensor) -> _Plan:
        """From `[N, 11]`."""
        is_warped, matrices, blends, factors, tables, arguments = columns.split([1, 6, 1, 1, 1, 1], dim=1)
        return cls(is_warped[:, 0], matrices, blends[:, 0], factors[:, 0], tables[:, 0], arguments[:, 0])

    def packed(self) -> Tensor:
        """`[N, 11]`."""
        return torch.cat([part.view(len(part), -1) for part in self], dim=1)


class RandAugment(Step):
    """Does some operations, chosen at random, to images of bytes."""

    purpose = "RandAugment"
    fill: Tensor

    def __init__(self, description: str, *, size: tuple[int, int], mean: Sequence[float]):
        """Read a description.

        Args:
            description: As for timm's `rand_augment_transform`.
            size: (height, width) of the images.
            mean: Per channel, of values from 0 to 1; fills what a warp leaves empty.

        Raises:
            ValueError: If the policy is not one that batches can take.
        """
        super().__init__()
        reason = unsupported_policy(description)
        if reason is not None:
            raise ValueError(f"{description!r} {reason}")
        policy: Any = rand_augment_transform(description, dict(TIMM_OPTIONS))
        first = policy.ops[0]
        self._names = [operation.name for operation in policy.ops]
        self._layers, self._probability, self._magnitude = policy.num_layers, first.prob, float(first.magnitude)
        self._spread, self._largest = first.magnitude_std, first.magnitude_max or LARGEST_MAGNITUDE
        self._size = size
        self.register_buffer("fill", torch.tensor([float(min(255, round(255 * value))) for value in mean]))

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """The plans of all layers, side by side."""
        layers = [self._draw_layer(count, generator, device).packed() for _ in range(self._layers)]
        return torch.cat(layers, dim=1)

    def _draw_layer(self, count: int, generator: torch.Generator, device: torch.device) -> _Plan:
        chosen = torch.randint(len(self._names), (count,), generator=generator).to(device)
        is_done = torch.rand(count, generator=generator).to(device) < self._probability
        sign = torch.where(torch.rand(count, generator=generator).to(device) < 0.5, 1.0, -1.0)
        level = self._draw_magnitudes(count, generator).to(device) / LARGEST_MAGNITUDE
        strength = _Strength(level, sign)
        nothing = torch.zeros(count, device=device)
        plan = _Plan(nothing, _matrix(1.0, nothing, nothing, nothing, 1.0, nothing), nothing, nothing, nothing, nothing)
        for number, name in enumerate(self._names):
            plan = self._with_operation(plan, name, strength, is_done & (chosen == number))
        return plan

    def _draw_magnitudes(self, count: int, generator: torch.Generator) -> Tensor:
        if math.isinf(self._spread):  # timm's way to ask for any up to the one that is named
            return torch.rand(count, generator=generator) * min(self._magnitude, self._largest)
        magnitudes = self._magnitude + self._spread * torch.randn(count, generator=generator)
        return magnitudes.clamp(0, self._largest)

    def _with_operation(self, plan: _Plan, name: str, strength: _Strength, where: Tensor) -> _Plan:
        """The plan with an operation for some of the samples."""
        if name in _WARPS:
            matrices = _WARPS[name](strength, self._size)
            return plan._replace(
                is_warped=plan.is_warped.masked_fill(where, 1.0),
                matrices=torch.where(where[:, None], matrices, plan.matrices),
            )
        if name in _BLENDS:
            kind, argument = _BLENDS[name]
            return plan._replace(
                blends=plan.blends.masked_fill(where, kind),
                factors=torch.where(where, argument(strength), plan.factors),
            )
        kind, argument = _TABLES[name]
        return plan._replace(
            tables=plan.tables.masked_fill(where, kind),
            arguments=torch.where(where, argument(strength), plan.arguments),
        )

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Layer by layer."""
        for columns in plan.chunk(self._layers, dim=1):
            layer = _Plan.unpacked(columns)
            values = images.float()
            warped = warp(values, layer.matrices, self.fill).round()
            # Where there is nothing to warp, not even by the identity: what is left alone stays so to the byte.
            values = torch.where(layer.is_warped[:, None, None, None] > 0, warped, values)
            values = blend(values, layer.blends, layer.factors)
            images = replace_values(values.to(torch.uint8), layer.tables, layer.arguments)
        return images


def unsupported_policy(description: str) -> str | None:
    """Why batches cannot be augmented as described; None if they can."""
    if not description.startswith("rand"):
        return "is not RandAugment, the only policy for whole batches; use one such as rand-m9-mstd0.5-inc1"
    try:
        policy: Any = rand_augment_transform(description, dict(TIMM_OPTIONS))
    except Exception as error:  # timm's parser asserts
        return f"is no description that timm can read ({error or type(error).__name__}); try rand-m9-mstd0.5-inc1"
    if policy.num_layers < 1:
        return "does nothing; use null for that"
    unknown = {operation.name for operation in policy.ops} - {*_WARPS, *_BLENDS, *_TABLES}
    if unknown or policy.choice_weights is not None:
        return "chooses from a set of its own, which whole batches cannot; leave its part that starts with t out"
    return None
