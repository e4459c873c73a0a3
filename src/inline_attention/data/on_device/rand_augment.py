"""RandAugment (Cubuk et al., 2019) and color jitter for whole batches, each image in its own way.

Operations, strengths and probabilities are timm's, and so are descriptions such as rand-m9-mstd0.5-inc1; images are
resampled bilinearly. Results are Pillow's to within a unit of 255. Every layer of a policy consists of one warp, one
blend and one table of values, of which at most one changes a given image. torchvision's transforms draw once for a
whole batch, and would have to be called image by image.

Shapes: `N` samples of a dataset, `B` batch, `C` channels, `H`, `W` height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from timm.data.auto_augment import rand_augment_transform
from torch import Tensor
from torch.nn import functional as F

from inline_attention.data.on_device.steps import Step

LEVELS = 256  # values of a byte
GRAY_SHARES = (0.299, 0.587, 0.114)  # of red, green and blue in what the eye takes for brightness


class Blend(IntEnum):
    """Images to blend with; 0 means none."""

    BRIGHTNESS = 1  # black
    CONTRAST = 2  # its mean gray
    COLOR = 3  # its gray image
    SHARPNESS = 4  # itself, smoothed


class Table(IntEnum):
    """Tables of new values, with their argument in brackets; 0 means none."""

    POSTERIZE = 1  # the high bits are kept (mask)
    SOLARIZE = 2  # bright values are inverted (first of them)
    SOLARIZE_ADD = 3  # dark values are raised (by how much)
    AUTO_CONTRAST = 4  # stretched to the full range, channel by channel (none)
    EQUALIZE = 5  # made to occur equally often, channel by channel (none)


def blend(images: Tensor, kinds: Tensor, factors: Tensor, possible: Sequence[Blend] = tuple(Blend)) -> Tensor:
    """Move images away from a duller version of themselves, or towards it.

    Args:
        images: `[B, 3, H, W]` whole numbers from 0 to 255, floating point.
        kinds: `[B]` of `Blend`, or 0 to leave an image alone.
        factors: `[B]` 0 gives the duller version, 1 the image, more than 1 exaggerates it.
        possible: The kinds that may occur.

    Returns:
        `[B, 3, H, W]` whole numbers from 0 to 255, floating point.
    """
    kinds, factors = kinds[:, None, None, None], factors[:, None, None, None]
    duller = images
    for kind in possible:
        duller = torch.where(kinds == kind, _DULLER[kind](images), duller)
    blended = (duller + factors * (images - duller)).clamp(0, 255).floor()
    return torch.where(kinds > 0, blended, images)


def _gray(images: Tensor) -> Tensor:
    red, green, blue = images.unbind(1)
    mixed = GRAY_SHARES[0] * red + GRAY_SHARES[1] * green + GRAY_SHARES[2] * blue
    return mixed.round()[:, None]


def _mean_gray(images: Tensor) -> Tensor:
    return _gray(images).mean((1, 2, 3), keepdim=True).round()


def _smoothed(images: Tensor) -> Tensor:
    """Each pixel counts five times, its eight neighbors once; the outermost pixels stay as they are."""
    if min(images.shape[-2:]) < 3:
        return images
    smoothed = images.clone()
    smoothed[..., 1:-1, 1:-1] = ((9 * F.avg_pool2d(images, 3, 1) + 4 * images[..., 1:-1, 1:-1]) / 13).round()
    return smoothed


_DULLER: dict[Blend, Callable[[Tensor], Tensor]] = {
    Blend.BRIGHTNESS: torch.zeros_like,
    Blend.CONTRAST: _mean_gray,
    Blend.COLOR: _gray,
    Blend.SHARPNESS: _smoothed,
}


def replace_values(images: Tensor, kinds: Tensor, arguments: Tensor) -> Tensor:
    """Replace each value by what a table has for it.

    Args:
        images: `[B, C, H, W]` uint8.
        kinds: `[B]` of `Table`, or 0 to leave an image alone.
        arguments: `[B]` whole numbers: see `Table`.

    Returns:
        `[B, C, H, W]` uint8.
    """
    values = torch.arange(LEVELS, device=images.device)
    kinds, arguments = kinds.long()[:, None, None], arguments.long()[:, None, None]
    pixels = images.flatten(2).long()  # [B, C, H·W]
    table = values.expand(*pixels.shape[:2], LEVELS)
    for kind, new_values in (
        (Table.POSTERIZE, values & arguments),
        (Table.SOLARIZE, torch.where(values < arguments, values, 255 - values)),
        (Table.SOLARIZE_ADD, torch.where(values < 128, values + arguments, values)),
        (Table.AUTO_CONTRAST, _stretched(pixels, values)),
        (Table.EQUALIZE, _equalized(pixels, values)),
    ):
        table = torch.where(kinds == kind, new_values, table)
    return table.clamp(0, 255).gather(2, pixels).view(images.shape).to(torch.uint8)


def _stretched(pixels: Tensor, values: Tensor) -> Tensor:
    darkest, brightest = pixels.aminmax(dim=2, keepdim=True)
    span = brightest - darkest
    return torch.where(span > 0, (values - darkest) * 255 // span.clamp(min=1), values)


def _equalized(pixels: Tensor, values: Tensor) -> Tensor:
    counts = torch.zeros(*pixels.shape[:2], LEVELS, dtype=torch.int64, device=pixels.device)
    counts.scatter_add_(2, pixels, torch.ones_like(pixels))
    of_brightest = counts.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - of_brightest) // 255  # pixels per new value; 0 if there are too few to tell
    below = counts.cumsum(2) - counts
    return torch.where(step > 0, (below + step // 2) // step.clamp(min=1), values)


def warp(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """Resample images, bilinearly.

    Args:
        images: `[B, C, H, W]` floating-point numbers.
        matrices: `[B, 6]` a, b, c, d, e, f as Pillow has them: the point (x, y) of the result is taken from
            (ax + by + c, dx + ey + f), in pixels from the upper left corner.
        fill: `[C]` for points from outside.

    Returns:
        `[B, C, H, W]`.
    """
    height, width = images.shape[-2:]
    # Not by `affine_grid`: TensorFloat32 may do its matrix product, and three digits are no place in an image.
    x = torch.arange(width, device=images.device) + 0.5  # centers of pixels
    y = (torch.arange(height, device=images.device) + 0.5)[:, None]
    a, b, c, d, e, f = matrices[:, :, None, None].unbind(1)
    from_x = (a * x + b * y + c) * (2 / width) - 1  # [B, H, W] from -1 at one border to 1 at the other
    from_y = (d * x + e * y + f) * (2 / height) - 1
    taken = F.grid_sample(
        images, torch.stack([from_x, from_y], dim=-1), mode="bilinear", padding_mode="border", align_corners=False
    )
    inside = (from_x.abs() <= 1) & (from_y.abs() <= 1)
    return torch.where(inside[:, None], taken, fill[:, None, None])


KINDS = (Blend.BRIGHTNESS, Blend.CONTRAST, Blend.COLOR)


class ColorJitter(Step):
    """Changes brightness, contrast and saturation of images of bytes."""

    purpose = "colour jitter"  # seeds depend on the text

    def __init__(self, strength: float):
        """Set up.

        Args:
            strength: Factors are drawn from 1 - strength, or 0 if that is more, to 1 + strength.
        """
        super().__init__()
        self._lowest, self._highest = max(0.0, 1 - strength), 1 + strength

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """Three kinds in the order of their turns, then their factors."""
        order, shares = torch.rand(2, count, len(KINDS), generator=generator).to(device)
        kinds = torch.tensor(KINDS, device=device)[order.argsort(dim=1)]
        return torch.cat([kinds, self._lowest + (self._highest - self._lowest) * shares], dim=1)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Blend once in each turn."""
        changed = images.float()
        for turn in range(len(KINDS)):
            changed = blend(changed, plan[:, turn], plan[:, len(KINDS) + turn], KINDS)
        return changed.to(torch.uint8)


LARGEST_MAGNITUDE = 10.0
# Not empty: of an empty one, some versions of timm keep what one description says for the next.
TIMM_OPTIONS = {"img_mean": (0, 0, 0)}


class _Strength(NamedTuple):
    """Strength of an operation for each sample: `[N]` from 0 to 1, or more if a description allows, and a sign."""

    level: Tensor
    sign: Tensor

    @property
    def signed(self) -> Tensor:
        return self.level * self.sign

    @property
    def factor(self) -> Tensor:
        """Factor of a blend, from 0.1 to 1.9."""
        return 0.1 + 1.8 * self.level

    @property
    def increasing_factor(self) -> Tensor:
        """Factor of a blend that moves away from 1 with the strength, on either side."""
        return (1 + 0.9 * self.signed).clamp(min=0.1)


Argument = Callable[[_Strength], Tensor]
_BLEND_KINDS = {
    "Brightness": Blend.BRIGHTNESS,
    "Contrast": Blend.CONTRAST,
    "Color": Blend.COLOR,
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
    "Equalize": (Table.EQUALIZE, lambda strength: torch.zeros_like(strength.level)),
    "Invert": (Table.SOLARIZE, lambda strength: torch.zeros_like(strength.level)),
    "Posterize": (Table.POSTERIZE, lambda strength: _without_low_bits((4 * strength.level).floor())),
    "PosterizeIncreasing": (Table.POSTERIZE, lambda strength: _without_low_bits(4 - (4 * strength.level).floor())),
    "Solarize": (Table.SOLARIZE, lambda strength: (256 * strength.level).floor()),
    "SolarizeIncreasing": (Table.SOLARIZE, lambda strength: 256 - (256 * strength.level).floor()),
    "SolarizeAdd": (Table.SOLARIZE_ADD, lambda strength: (110 * strength.level).floor().clamp(max=128)),
}


def _matrix(*entries: Tensor | float) -> Tensor:
    """`[N, 6]` of entries of which some are `[N]`, the others the same for all."""
    some = next(entry for entry in entries if isinstance(entry, Tensor))
    return torch.stack([entry if isinstance(entry, Tensor) else torch.full_like(some, entry) for entry in entries], 1)


def _rotation(strength: _Strength, size: tuple[int, int]) -> Tensor:
    """Counter-clockwise about the center, up to 30 degrees."""
    angle = -math.radians(30) * strength.signed
    center_y, center_x = size[0] / 2, size[1] / 2
    cos, sin = angle.cos(), angle.sin()
    return _matrix(
        cos, sin, center_x - cos * center_x - sin * center_y, -sin, cos, center_y + sin * center_x - cos * center_y
    )


_WARPS: dict[str, Callable[[_Strength, tuple[int, int]], Tensor]] = {
    "Rotate": _rotation,
    "ShearX": lambda strength, _: _matrix(1.0, 0.3 * strength.signed, 0.0, 0.0, 1.0, 0.0),
    "ShearY": lambda strength, _: _matrix(1.0, 0.0, 0.0, 0.3 * strength.signed, 1.0, 0.0),
    "TranslateXRel": lambda strength, size: _matrix(1.0, 0.0, 0.45 * size[1] * strength.signed, 0.0, 1.0, 0.0),
    "TranslateYRel": lambda strength, size: _matrix(1.0, 0.0, 0.0, 0.0, 1.0, 0.45 * size[0] * strength.signed),
}


class _Plan(NamedTuple):
    """Plan of one layer for each sample.

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
            description: timm's description of RandAugment.
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
