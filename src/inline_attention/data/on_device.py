"""Small datasets kept decoded on the device, where whole batches are augmented, each image in its own way.

What happens to a sample is drawn on the CPU for a whole epoch at once (the plan). It is the same on every device and
for every composition of batches. A batch picks its rows of the plan and follows them without waiting for the GPU.
torchvision's transforms draw once for a whole batch, and would have to be called image by image.

Shapes: `N` samples, `P` columns of a plan, `R` rectangles, `B` batch, `C` channels, `H`, `W` height and width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImages
from inline_attention.data.loading import ImageLoader, Loader
from inline_attention.data.randomness import derived_seed
from inline_attention.data.sampling import Batches, EvaluationBatches
from inline_attention.data.sources import ImageSource
from inline_attention.data.transforms import evaluation_transform

DECODING_BATCH = 256
BYTE_VALUES = 256
GRAY_SHARES = (0.299, 0.587, 0.114)  # weights of red, green and blue in a gray value
LARGEST_MAGNITUDE = 10.0
# Not empty: of an empty one, some versions of timm keep what one description says for the next.
TIMM_OPTIONS = {"img_mean": (0, 0, 0)}
SMALLEST_ERASED, LARGEST_ERASED = 0.02, 1 / 3  # shares of the image, for all its rectangles together
LARGEST_ASPECT = 1 / 0.3  # of erased rectangles
LARGEST_KEY = 1 << 24  # whole numbers that float32 tells apart
LOW_32_BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class MemoryImages:
    """Decoded images.

    Attributes:
        images: `[N, C, H, W]` uint8.
        targets: `[N]` class numbers.
        indices: `[N]` numbers in the dataset they are from.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.targets)


def decode_to_memory(
    source: ImageSource,
    size: tuple[int, int],
    *,
    broken: BrokenImages,
    workers: int = 0,
    interpolation: str = "bicubic",
) -> MemoryImages:
    """Decode a whole dataset; broken images are left out.

    Args:
        source: The images.
        size: (height, width) to which those of another size are resized, without regard to their shape.
        broken: Collects broken images.
        workers: Processes to decode with.
        interpolation: "bicubic", "bilinear" or "nearest".

    Raises:
        BrokenImagesError: If more are broken than allowed.
    """
    transform = evaluation_transform(size, crop_pct=1.0, crop_mode="squash", interpolation=interpolation)
    batches = EvaluationBatches(len(source), DECODING_BATCH)
    loader = ImageLoader(source, transform, batches, broken=broken, replace_broken=False, workers=workers)
    decoded = [(batch.images, batch.targets, batch.indices) for batch in loader.epoch()]
    loader.close()
    images, targets, indices = (torch.cat(parts) for parts in zip(*decoded, strict=True))
    return MemoryImages(images.contiguous(), targets, indices)


class MemoryLoader(Loader[Batch]):
    """Batches of decoded images, augmented if asked.

    What happens to a sample depends on (seed, epoch, its number) alone: not on the device, the size of batches or the
    number of processes.
    """

    def __init__(
        self,
        data: MemoryImages,
        batches: Batches,
        *,
        augmentation: BatchAugmentation,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ):
        """Move the images to the device.

        Args:
            data: The images.
            batches: Samples of each batch, by their number in `data`.
            augmentation: Augmentation of each batch; without any steps it only normalizes.
            device: Device that keeps the images and makes batches.
            seed: Random seed of the augmentation.
        """
        self._device = torch.device(device)
        self._images, self._targets, self._indices = (
            tensor.to(self._device) for tensor in (data.images, data.targets, data.indices)
        )
        self._augmentation = augmentation.to(self._device)
        self._batches, self._seed = batches, seed

    def epoch(self, epoch: int = 0, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from `start_batch` on."""
        plans = self._augmentation.draw(len(self._targets), self._seed, epoch, self._device)
        for key in self._batches.keys(epoch, start_batch):
            chosen = key.indices.to(self._device, non_blocking=True)
            images = self._augmentation(self._images[chosen], [plan[chosen] for plan in plans])
            yield Batch(epoch, key.number, images, self._targets[chosen], self._indices[chosen])


class Step(nn.Module, ABC):
    """One random change of images."""

    purpose: ClassVar[str]  # part of the random seed, so that adding a step changes nothing about the others

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """Draw the plan of `count` samples, `[N, P]` float32 on the device, with a generator on the CPU."""

    @abstractmethod
    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Change images `[B, C, H, W]` as their rows of the plan `[B, P]` say. The dtype stays the same."""


class BatchAugmentation(nn.Module):
    """Steps on bytes, normalization, steps on normalized numbers."""

    def __init__(self, on_bytes: Sequence[Step], normalize: Normalize, on_numbers: Sequence[Step] = ()):
        """Combine the steps."""
        super().__init__()
        self._on_bytes, self._on_numbers = nn.ModuleList(on_bytes), nn.ModuleList(on_numbers)
        self._normalize = normalize

    def draw(self, count: int, seed: int, epoch: int, device: torch.device) -> list[Tensor]:
        """Draw the plan of every step for `count` samples in an epoch: `[N, P]` each."""
        plans: list[Tensor] = []
        for step in (*self._on_bytes, *self._on_numbers):
            assert isinstance(step, Step)
            generator = torch.Generator().manual_seed(derived_seed(step.purpose, seed, epoch))
            plans.append(step.draw(count, generator, device))
        return plans

    def forward(self, images: Tensor, plans: Sequence[Tensor]) -> Tensor:
        """Augment and normalize.

        Args:
            images: `[B, C, H, W]` uint8.
            plans: `[B, P]` of each step: the rows of these images.

        Returns:
            `[B, C, H, W]` normalized.
        """
        border = len(self._on_bytes)
        for step, plan in zip(self._on_bytes, plans[:border], strict=True):
            images = step(images, plan)
        images = self._normalize(images)
        for step, plan in zip(self._on_numbers, plans[border:], strict=True):
            images = step(images, plan)
        return images


def training_augmentation(
    size: tuple[int, int],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    crop_padding: int = 0,
    hflip: float = 0.0,
    vflip: float = 0.0,
    auto_augment: str | None = None,
    color_jitter: float = 0.0,
    re_prob: float = 0.0,
    re_mode: Literal["pixel", "rand", "const"] = "pixel",
    re_count: int = 1,
) -> BatchAugmentation:
    """Padded crop, flips, colors and erasing, in the words of `training_transform`.

    Args:
        size: (height, width) of the images.
        mean: Per channel, of values from 0 to 1.
        std: Per channel, of values from 0 to 1.
        crop_padding: Black pixels added on each side, from which the original size is cropped.
        hflip: Probability of a left-right flip.
        vflip: Probability of an upside-down flip.
        auto_augment: timm's description of RandAugment.
        color_jitter: Strength of changes of brightness, contrast and saturation; as in timm, none beside
            `auto_augment`.
        re_prob: Probability of erasing rectangles.
        re_mode: Fill of the rectangles: noise per pixel, one random color, or the mean.
        re_count: Largest number of them.
    """
    on_bytes: list[Step] = []
    if crop_padding or hflip or vflip:
        on_bytes.append(PaddedCropAndFlip(crop_padding, hflip=hflip, vflip=vflip))
    if auto_augment is not None:
        on_bytes.append(RandAugment(auto_augment, size=size, mean=mean))
    elif color_jitter:
        on_bytes.append(ColorJitter(color_jitter))
    erasing = [RandomErasing(re_prob, size=size, mode=re_mode, largest_count=re_count)] if re_prob else []
    return BatchAugmentation(on_bytes, Normalize(mean, std), erasing)


class PaddedCropAndFlip(Step):
    """Adds a black border, crops the original size out of that, and flips the result."""

    purpose = "crop and flip"

    def __init__(self, padding: int, *, hflip: float = 0.0, vflip: float = 0.0):
        super().__init__()
        self._padding, self._hflip, self._vflip = padding, hflip, vflip

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """Top and left of the crop in the padded image, then 1 or 0 for each flip."""
        corners = torch.randint(2 * self._padding + 1, (count, 2), generator=generator)
        mirrored = torch.rand(count, 1, generator=generator) < self._hflip
        upside_down = torch.rand(count, 1, generator=generator) < self._vflip
        return torch.cat([corners, mirrored, upside_down], dim=1).float().to(device)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Crop and flip by one lookup; the result is in channels-last order."""
        top, left, mirrored, upside_down = plan.long()[:, :, None].unbind(1)
        height, width = images.shape[-2:]
        rows, columns = (torch.arange(side, device=images.device) for side in (height, width))
        rows = torch.where(upside_down > 0, rows.flip(0), rows) + top  # [B, H]
        columns = torch.where(mirrored > 0, columns.flip(0), columns) + left
        padded = F.pad(images, (self._padding,) * 4)
        samples = torch.arange(len(images), device=images.device)
        cropped = padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # [B, H, W, C]
        return cropped.permute(0, 3, 1, 2)


class Operation(IntEnum):
    """Changes of one image, with their arguments in brackets."""

    NONE = 0
    # Blends with a duller image (factor: 0 gives the duller one, 1 the image, more exaggerates it).
    BRIGHTNESS = 1  # black
    CONTRAST = 2  # its mean gray
    COLOR = 3  # its gray image
    SHARPNESS = 4  # itself, smoothed
    # Tables of new values.
    POSTERIZE = 5  # the high bits are kept (mask)
    SOLARIZE = 6  # bright values are inverted (first of them)
    SOLARIZE_ADD = 7  # dark values are raised (by how much)
    AUTO_CONTRAST = 8  # stretched to the full range, channel by channel (none)
    EQUALIZE = 9  # made to occur equally often, channel by channel (none)
    WARP = 10  # resampled (matrix)


BLENDS = (Operation.BRIGHTNESS, Operation.CONTRAST, Operation.COLOR, Operation.SHARPNESS)
JITTERED = BLENDS[:3]


def blend(images: Tensor, operations: Tensor, factors: Tensor, possible: Sequence[Operation] = BLENDS) -> Tensor:
    """Blend images `[B, 3, H, W]`, whole numbers in floating point, whose operation `[B]` is one of those possible."""
    operations, factors = operations[:, None, None, None], factors[:, None, None, None]
    duller = images
    for operation in possible:
        duller = torch.where(operations == operation, _duller(operation, images), duller)
    return (duller + factors * (images - duller)).clamp(0, 255).floor()


def _duller(operation: Operation, images: Tensor) -> Tensor:
    if operation == Operation.BRIGHTNESS:
        return torch.zeros_like(images)
    if operation == Operation.SHARPNESS:
        return _smoothed(images)
    red, green, blue = images.unbind(1)
    gray = (GRAY_SHARES[0] * red + GRAY_SHARES[1] * green + GRAY_SHARES[2] * blue).round()[:, None]
    return gray if operation == Operation.COLOR else gray.mean((1, 2, 3), keepdim=True).round()


def _smoothed(images: Tensor) -> Tensor:
    """Each pixel counts five times, its eight neighbors once; the outermost pixels stay as they are."""
    if min(images.shape[-2:]) < 3:
        return images
    smoothed = images.clone()
    smoothed[..., 1:-1, 1:-1] = ((9 * F.avg_pool2d(images, 3, 1) + 4 * images[..., 1:-1, 1:-1]) / 13).round()
    return smoothed


def replace_values(images: Tensor, operations: Tensor, arguments: Tensor) -> Tensor:
    """Replace each value of images `[B, C, H, W]` uint8 by what the table of their operation `[B]` has for it."""
    values = torch.arange(BYTE_VALUES, device=images.device)
    operations, arguments = operations.long()[:, None, None], arguments.long()[:, None, None]
    pixels = images.flatten(2).long()  # [B, C, H·W]
    table = values.expand(*pixels.shape[:2], BYTE_VALUES)
    for operation, new_values in (
        (Operation.POSTERIZE, values & arguments),
        (Operation.SOLARIZE, torch.where(values < arguments, values, 255 - values)),
        (Operation.SOLARIZE_ADD, torch.where(values < 128, values + arguments, values)),
        (Operation.AUTO_CONTRAST, _stretched(pixels, values)),
        (Operation.EQUALIZE, _equalized(pixels, values)),
    ):
        table = torch.where(operations == operation, new_values, table)
    return table.clamp(0, 255).gather(2, pixels).view(images.shape).to(torch.uint8)


def _stretched(pixels: Tensor, values: Tensor) -> Tensor:
    darkest, brightest = pixels.aminmax(dim=2, keepdim=True)
    span = brightest - darkest
    return torch.where(span > 0, (values - darkest) * 255 // span.clamp(min=1), values)


def _equalized(pixels: Tensor, values: Tensor) -> Tensor:
    counts = torch.zeros(*pixels.shape[:2], BYTE_VALUES, dtype=torch.int64, device=pixels.device)
    counts.scatter_add_(2, pixels, torch.ones_like(pixels))
    of_brightest = counts.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - of_brightest) // 255  # pixels per new value; 0 if there are too few to tell
    below = counts.cumsum(2) - counts
    return torch.where(step > 0, (below + step // 2) // step.clamp(min=1), values)


def warp(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """Resample images `[B, C, H, W]` bilinearly; points from outside are filled with `fill` `[C]`.

    Matrices `[B, 6]` are a, b, c, d, e, f as Pillow has them: the point (x, y) of the result is taken from
    (ax + by + c, dx + ey + f), in pixels from the upper left corner.
    """
    height, width = images.shape[-2:]
    # Not by `affine_grid`: TensorFloat32 may do its matrix product, and three digits are no place in an image.
    x = torch.arange(width, device=images.device) + 0.5  # centers of pixels
    y = (torch.arange(height, device=images.device) + 0.5)[:, None]
    a, b, c, d, e, f = matrices[:, :, None, None].unbind(1)
    from_x = (a * x + b * y + c) * (2 / width) - 1  # [B, H, W] from -1 at one border to 1 at the other
    from_y = (d * x + e * y + f) * (2 / height) - 1
    grid = torch.stack([from_x, from_y], dim=-1)
    taken = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    inside = (from_x.abs() <= 1) & (from_y.abs() <= 1)
    return torch.where(inside[:, None], taken, fill[:, None, None])


class ColorJitter(Step):
    """Changes brightness, contrast and saturation by factors from 1 - strength, but at least 0, to 1 + strength."""

    purpose = "colour jitter"  # seeds depend on the text

    def __init__(self, strength: float):
        super().__init__()
        self._lowest, self._highest = max(0.0, 1 - strength), 1 + strength

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """Three operations in random order, then their factors."""
        order, shares = torch.rand(2, count, len(JITTERED), generator=generator).to(device)
        operations = torch.tensor(JITTERED, device=device)[order.argsort(dim=1)]
        return torch.cat([operations, self._lowest + (self._highest - self._lowest) * shares], dim=1)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Blend three times."""
        changed = images.float()
        operations, factors = plan.chunk(2, dim=1)
        for turn in range(len(JITTERED)):
            changed = blend(changed, operations[:, turn], factors[:, turn], JITTERED)
        return changed.to(torch.uint8)


class _Strength(NamedTuple):
    """Strength for each sample, `[N]` from 0 to 1, or more if a description allows; and the size of images."""

    level: Tensor
    signed: Tensor
    height: int
    width: int


def _factor(strength: _Strength) -> tuple[Tensor]:
    return (0.1 + 1.8 * strength.level,)


def _increasing_factor(strength: _Strength) -> tuple[Tensor]:
    """Factor that moves away from 1 with the strength, on either side."""
    return ((1 + 0.9 * strength.signed).clamp(min=0.1),)


def _high_bits(count: Tensor) -> tuple[Tensor]:
    """A mask that keeps the `count` highest of eight bits."""
    return (256 - 2.0 ** (8 - count.clamp(0, 8)),)


def _rotation(strength: _Strength) -> tuple[Tensor, ...]:
    """Counter-clockwise about the center, up to 30 degrees."""
    angle = -math.radians(30) * strength.signed
    x, y = strength.width / 2, strength.height / 2
    cos, sin = angle.cos(), angle.sin()
    return cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y


# The operations of RandAugment (Cubuk et al., 2019) by timm's names, with timm's strengths. Images are resampled
# bilinearly. Results are Pillow's to within a unit of 255.
_RAND_AUGMENT: dict[str, tuple[Operation, Callable[[_Strength], tuple[Tensor | float, ...]]]] = {
    "Brightness": (Operation.BRIGHTNESS, _factor),
    "Contrast": (Operation.CONTRAST, _factor),
    "Color": (Operation.COLOR, _factor),
    "Sharpness": (Operation.SHARPNESS, _factor),
    "BrightnessIncreasing": (Operation.BRIGHTNESS, _increasing_factor),
    "ContrastIncreasing": (Operation.CONTRAST, _increasing_factor),
    "ColorIncreasing": (Operation.COLOR, _increasing_factor),
    "SharpnessIncreasing": (Operation.SHARPNESS, _increasing_factor),
    "AutoContrast": (Operation.AUTO_CONTRAST, lambda _: ()),
    "Equalize": (Operation.EQUALIZE, lambda _: ()),
    "Invert": (Operation.SOLARIZE, lambda _: ()),
    "Posterize": (Operation.POSTERIZE, lambda by: _high_bits((4 * by.level).floor())),
    "PosterizeIncreasing": (Operation.POSTERIZE, lambda by: _high_bits(4 - (4 * by.level).floor())),
    "Solarize": (Operation.SOLARIZE, lambda by: ((256 * by.level).floor(),)),
    "SolarizeIncreasing": (Operation.SOLARIZE, lambda by: (256 - (256 * by.level).floor(),)),
    "SolarizeAdd": (Operation.SOLARIZE_ADD, lambda by: ((110 * by.level).floor().clamp(max=128),)),
    "Rotate": (Operation.WARP, _rotation),
    "ShearX": (Operation.WARP, lambda by: (1.0, 0.3 * by.signed, 0.0, 0.0, 1.0, 0.0)),
    "ShearY": (Operation.WARP, lambda by: (1.0, 0.0, 0.0, 0.3 * by.signed, 1.0, 0.0)),
    "TranslateXRel": (Operation.WARP, lambda by: (1.0, 0.0, 0.45 * by.width * by.signed, 0.0, 1.0, 0.0)),
    "TranslateYRel": (Operation.WARP, lambda by: (1.0, 0.0, 0.0, 0.0, 1.0, 0.45 * by.height * by.signed)),
}
ARGUMENTS = 6  # of a warp; others have fewer


class RandAugment(Step):
    """Some operations, chosen at random, on images of bytes."""

    purpose = "RandAugment"
    fill: Tensor

    def __init__(self, description: str, *, size: tuple[int, int], mean: Sequence[float]):
        """Read timm's description; the mean fills what a warp of images of a (height, width) leaves empty.

        Raises:
            ValueError: If the policy is not one that batches can take.
        """
        super().__init__()
        reason = unsupported_policy(description)
        if reason is not None:
            raise ValueError(f"{description!r} {reason}")
        policy = _read_policy(description)
        first = policy.ops[0]
        self._names = [operation.name for operation in policy.ops]
        self._layers, self._probability, self._magnitude = policy.num_layers, first.prob, float(first.magnitude)
        self._spread, self._largest = first.magnitude_std, first.magnitude_max or LARGEST_MAGNITUDE
        self._size = size
        self.register_buffer("fill", torch.tensor([float(min(255, round(255 * value))) for value in mean]))

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """For each layer the operation and its arguments."""
        return torch.cat([self._draw_layer(count, generator, device) for _ in range(self._layers)], dim=1)

    def _draw_layer(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        chosen = torch.randint(len(self._names), (count,), generator=generator).to(device)
        is_done = torch.rand(count, generator=generator).to(device) < self._probability
        sign = torch.where(torch.rand(count, generator=generator).to(device) < 0.5, 1.0, -1.0)
        level = self._draw_magnitudes(count, generator).to(device) / LARGEST_MAGNITUDE
        strength = _Strength(level, level * sign, *self._size)
        plan = torch.zeros(count, 1 + ARGUMENTS, device=device)
        for number, name in enumerate(self._names):
            operation, arguments = _RAND_AUGMENT[name]
            row = torch.zeros_like(plan)
            for column, value in enumerate((float(operation), *arguments(strength))):
                row[:, column] = value
            plan = torch.where((is_done & (chosen == number))[:, None], row, plan)
        return plan

    def _draw_magnitudes(self, count: int, generator: torch.Generator) -> Tensor:
        if math.isinf(self._spread):  # timm's way to ask for any up to the one that is named
            return torch.rand(count, generator=generator) * min(self._magnitude, self._largest)
        magnitudes = self._magnitude + self._spread * torch.randn(count, generator=generator)
        return magnitudes.clamp(0, self._largest)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Layer by layer a warp, a blend and a table, of which at most one changes a given image."""
        for layer in plan.chunk(self._layers, dim=1):
            operations, arguments = layer[:, 0], layer[:, 1:]
            values = images.float()
            warped = warp(values, arguments, self.fill).round()
            values = torch.where(operations[:, None, None, None] == Operation.WARP, warped, values)
            values = blend(values, operations, arguments[:, 0])
            images = replace_values(values.to(torch.uint8), operations, arguments[:, 0])
        return images


def _read_policy(description: str) -> Any:
    from timm.data.auto_augment import rand_augment_transform  # on first use: a check of data does not wait for it

    return rand_augment_transform(description, dict(TIMM_OPTIONS))


def unsupported_policy(description: str) -> str | None:
    """Return why batches cannot be augmented as described; None if they can."""
    if not description.startswith("rand"):
        return "is not RandAugment, the only policy for whole batches; use one such as rand-m9-mstd0.5-inc1"
    try:
        policy = _read_policy(description)
    except Exception as error:  # timm's parser asserts
        return f"is no description that timm can read ({error or type(error).__name__}); try rand-m9-mstd0.5-inc1"
    if policy.num_layers < 1:
        return "does nothing; use null for that"
    if policy.choice_weights is not None or any(operation.name not in _RAND_AUGMENT for operation in policy.ops):
        return "chooses from a set of its own, which whole batches cannot; leave its part that starts with t out"
    return None


class RandomErasing(Step):
    """Fills rectangles of normalized images with noise ("pixel"), one random color each ("rand"), or zeros ("const").

    An image has from 1 to `largest_count` rectangles, which are the smaller the more there are.
    """

    purpose = "erasing"

    def __init__(
        self, probability: float, *, size: tuple[int, int], mode: Literal["pixel", "rand", "const"], largest_count: int
    ):
        super().__init__()
        self._probability, self._size, self._mode, self._largest_count = probability, size, mode, largest_count

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """A key for the fill, then top, bottom, left and right of each rectangle; empty ones where there is none.

        Where a rectangle does not fit timm tries others; here it is cut to fit, which is rare.
        """
        rectangles = self._largest_count
        key = torch.randint(LARGEST_KEY, (count, 1), generator=generator).to(device)
        erased = torch.rand(count, 1, generator=generator).to(device) < self._probability
        wanted = torch.randint(1, rectangles + 1, (count, 1), generator=generator).to(device)
        share, aspect, down, right = torch.rand(4, count, rectangles, generator=generator).to(device)
        height, width = self._size
        area = height * width * (SMALLEST_ERASED + (LARGEST_ERASED - SMALLEST_ERASED) * share) / wanted
        aspect = torch.exp(math.log(LARGEST_ASPECT) * (2 * aspect - 1))
        present = erased & (torch.arange(rectangles, device=device) < wanted)
        tall = (area * aspect).sqrt().round().clamp(max=height - 1) * present
        wide = (area / aspect).sqrt().round().clamp(max=width - 1) * present
        top = (down * (height - tall + 1)).floor()
        left = (right * (width - wide + 1)).floor()
        corners = torch.stack([top, top + tall, left, left + wide], dim=2)  # [N, R, 4]
        return torch.cat([key, corners.flatten(1)], dim=1)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Fill the rectangles."""
        height, width = images.shape[2:]
        rows = torch.arange(height, device=images.device)[:, None]
        columns = torch.arange(width, device=images.device)
        keys, corners = plan[:, 0], plan[:, 1:].view(len(plan), -1, 4)
        fills = self._fills(keys, images.shape).to(images.dtype)
        for rectangle in range(self._largest_count):
            top, bottom, left, right = corners[:, rectangle, :, None, None].unbind(1)
            inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)  # [B, H, W]
            images = torch.where(inside[:, None], fills[:, rectangle], images)
        return images

    def _fills(self, keys: Tensor, shape: torch.Size) -> Tensor:
        """Return the fill of rectangles, `[B, R, C, H or 1, W or 1]`."""
        _, channels, height, width = shape
        if self._mode == "pixel":
            return pixel_noise(keys, (1, channels, height, width)).expand(-1, self._largest_count, -1, -1, -1)
        if self._mode == "rand":
            return pixel_noise(keys, (self._largest_count, channels, 1, 1))
        return torch.zeros(len(keys), self._largest_count, channels, 1, 1, device=keys.device)


def pixel_noise(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Noise of zero mean and unit variance, `[B, *shape]`, from a whole number below `LARGEST_KEY` per image, `[B]`."""
    places = torch.arange(math.prod(shape), device=keys.device)
    hashes = _hashed(_hashed(keys.long())[:, None] ^ places)
    uniform = ((hashes >> 9).float() + 0.5) * 2**-23  # as many bits as float32 holds between, but not at, 0 and 1
    return (math.sqrt(2) * torch.erfinv(2 * uniform - 1)).view(-1, *shape)


def _hashed(numbers: Tensor) -> Tensor:
    """Whole numbers below 2³², mixed such that each bit depends on all: the last steps of MurmurHash3."""
    numbers = numbers ^ (numbers >> 16)
    numbers = (numbers * 0x85EBCA6B) & LOW_32_BITS
    numbers = numbers ^ (numbers >> 13)
    numbers = (numbers * 0xC2B2AE35) & LOW_32_BITS
    return numbers ^ (numbers >> 16)
