"""Small datasets kept decoded on the device, where whole batches are augmented, each image in its own way.

The random numbers of all samples are drawn on the CPU for a whole epoch at once (the plan). They are the same on every
device and for every batch size. A batch takes its rows of the plan, and the CPU does not wait for the GPU. The random
transforms of torchvision draw once per batch, and most of its functions take one argument for all images.

Shapes: `N` samples, `P` columns of a plan, `R` rectangles, `B` batch, `C` channels, `H`, `W` height and width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as transforms

from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImages
from inline_attention.data.loading import ImageLoader, Loader
from inline_attention.data.randomness import derived_seed
from inline_attention.data.sampling import Batches, EvaluationBatches
from inline_attention.data.sources import ImageSource
from inline_attention.data.transforms import evaluation_transform

DECODING_BATCH = 256
LARGEST_MAGNITUDE = 10.0
# Not empty: some versions of timm change an empty one, and use it again for the next description.
TIMM_OPTIONS = {"img_mean": (0, 0, 0)}
SMALLEST_ERASED, LARGEST_ERASED = 0.02, 1 / 3  # shares of the image, all rectangles together
LARGEST_ASPECT = 1 / 0.3  # of erased rectangles
EraseMode = Literal["pixel", "rand", "const"]
NOISE_VALUES = 1 << 20  # of the table that fills erased pixels


@dataclass(frozen=True)
class MemoryImages:
    """Decoded images."""

    images: Tensor  # [N, C, H, W] uint8
    targets: Tensor  # [N] class numbers
    indices: Tensor  # [N] numbers in the dataset they are from

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
    """Decode a whole dataset with so many worker processes; interpolation is "bicubic", "bilinear" or "nearest".

    Images of another (height, width) are resized to `size` without regard to their shape. Broken ones are left out and
    collected in `broken`; `BrokenImagesError` if they are more than allowed.
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

    The augmentation of a sample depends only on (seed, epoch, index), not on the device, the batch size or the number
    of processes.
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
        """Move the images to the device, which keeps them and makes batches of their numbers in `data`.

        The seed is that of the augmentation, which only normalizes if it has no steps.
        """
        self._device = torch.device(device)
        tensors = data.images, data.targets, data.indices
        self._images, self._targets, self._indices = (tensor.to(self._device) for tensor in tensors)
        self._augmentation = augmentation.to(self._device)
        self._batches, self._seed = batches, seed

    def epoch(self, epoch: int = 0, start_batch: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from `start_batch` on."""
        drawn = self._augmentation.draw(len(self._targets), self._seed, epoch)
        plans = [plan.to(self._device) for plan in drawn]
        for key in self._batches.keys(epoch, start_batch):
            chosen = key.indices.to(self._device, non_blocking=True)
            images = self._augmentation(self._images[chosen], [plan[chosen] for plan in plans])
            yield Batch(epoch, key.number, images, self._targets[chosen], self._indices[chosen])


class Step(nn.Module, ABC):
    """One random change of images."""

    purpose: ClassVar[str]  # part of the random seed, so that adding a step changes nothing about the others

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw the plan of `count` samples, `[N, P]` float32 on the CPU."""

    @abstractmethod
    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Change images `[B, C, H, W]` as their rows of the plan `[B, P]` say. The dtype stays the same."""


class BatchAugmentation(nn.Module):
    """Steps on bytes, normalization, steps on normalized numbers."""

    def __init__(self, on_bytes: Sequence[Step], normalize: Normalize, on_numbers: Sequence[Step] = ()):
        """Combine the steps."""
        super().__init__()
        self._steps = nn.ModuleList([*on_bytes, normalize, *on_numbers])

    def draw(self, count: int, seed: int, epoch: int) -> list[Tensor]:
        """Draw the plan of every step for `count` samples in an epoch: `[N, P]` each, on the CPU."""
        return [
            step.draw(count, torch.Generator().manual_seed(derived_seed(step.purpose, seed, epoch)))
            for step in self._steps
            if isinstance(step, Step)
        ]

    def forward(self, images: Tensor, plans: Sequence[Tensor]) -> Tensor:
        """Augment and normalize images `[B, C, H, W]` uint8, by their rows `[B, P]` of the plan of each step."""
        rows = iter(plans)
        for step in self._steps:
            images = step(images, next(rows)) if isinstance(step, Step) else step(images)
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
    re_mode: EraseMode = "pixel",
    re_count: int = 1,
) -> BatchAugmentation:
    """Padded crop, flips, colors and erasing, in the words of `training_transform`.

    Args:
        size: (height, width) of the images.
        mean, std: Per channel, of values from 0 to 1.
        crop_padding: Black pixels added on each side, from which the original size is cropped.
        hflip, vflip: Probabilities of a left-right and of an upside-down flip.
        auto_augment: timm's description of RandAugment.
        color_jitter: Strength of changes of brightness, contrast and saturation; as in timm, none with `auto_augment`.
        re_prob: Probability of erasing rectangles.
        re_mode: Fill of the rectangles: noise per pixel, one random color, or the mean.
        re_count: Largest number of them.
    """
    on_bytes: list[Step] = []
    if crop_padding or hflip or vflip:
        on_bytes.append(PaddedCropAndFlip(crop_padding, hflip=hflip, vflip=vflip))
    if auto_augment is not None:
        on_bytes.append(RandAugment(auto_augment, mean=mean))
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

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw top and left of the crop in the padded image, then 1 or 0 for each flip."""
        corners = torch.randint(2 * self._padding + 1, (count, 2), generator=generator)
        mirrored = torch.rand(count, 1, generator=generator) < self._hflip
        upside_down = torch.rand(count, 1, generator=generator) < self._vflip
        return torch.cat([corners, mirrored, upside_down], dim=1).float()

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


def blend(images: Tensor, duller: Tensor, factors: Tensor) -> Tensor:
    """Mix bytes with a duller image: factor 0 returns the duller one, 1 the image, and more exaggerates it."""
    return (duller + factors * (images - duller)).clamp(0, 255).to(torch.uint8)


def _gray(images: Tensor) -> Tensor:
    return transforms.rgb_to_grayscale(images.float()).round()


def _smoothed(images: Tensor) -> Tensor:
    """Each pixel counts five times, its eight neighbors once; the outermost pixels stay as they are."""
    smoothed = images.float()
    if min(images.shape[-2:]) >= 3:
        inner = smoothed[..., 1:-1, 1:-1]
        inner.copy_(((9 * F.avg_pool2d(smoothed, 3, 1) + 4 * inner) / 13).round())
    return smoothed


# What an image is blended with.
DULLER: dict[str, Callable[[Tensor], Tensor]] = {
    "Brightness": lambda images: torch.zeros((), device=images.device),
    "Contrast": lambda images: _gray(images).mean((1, 2, 3), keepdim=True).round(),
    "Color": _gray,
    "Sharpness": _smoothed,
}


class ColorJitter(Step):
    """Changes brightness, contrast and saturation by factors from 1 - strength, but at least 0, to 1 + strength."""

    purpose = "colour jitter"  # seeds depend on the text
    names = ("Brightness", "Contrast", "Color")

    def __init__(self, strength: float):
        super().__init__()
        self._lowest, self._highest = max(0.0, 1 - strength), 1 + strength

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw the order of the three blends, by their numbers, then their factors."""
        order, shares = torch.rand(2, count, len(self.names), generator=generator)
        return torch.cat([order.argsort(dim=1), self._lowest + (self._highest - self._lowest) * shares], dim=1)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Blend three times."""
        order, factors = plan[..., None, None, None].chunk(2, dim=1)
        for turn in range(len(self.names)):
            duller = images.float()
            for number, name in enumerate(self.names):
                duller = torch.where(order[:, turn] == number, DULLER[name](images), duller)
            images = blend(images, duller, factors[:, turn])
        return images


def _posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest bits."""
    return images & (256 - torch.exp2(8 - bits.clamp(0, 8))).round().to(torch.uint8)


def _solarize(images: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(images < threshold, images, 255 - images)


# The operations of RandAugment (Cubuk et al., 2019) by timm's names, with timm's strengths: functions of bytes
# `[B, 3, H, W]` and of a level for each image, `[B, 1, 1, 1]`, from 0 to 1, or more if a description allows.
# Results differ from Pillow's by at most one unit of 255.
BLENDS = {**DULLER, **{f"{name}Increasing": duller for name, duller in DULLER.items()}}
RECOLORING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "AutoContrast": lambda images, _: transforms.autocontrast(images),
    "Equalize": lambda images, _: transforms.equalize(images),
    "Invert": lambda images, _: 255 - images,
    "Posterize": lambda images, level: _posterize(images, (4 * level).floor()),
    "PosterizeIncreasing": lambda images, level: _posterize(images, 4 - (4 * level).floor()),
    "Solarize": lambda images, level: _solarize(images, (256 * level).floor()),
    "SolarizeIncreasing": lambda images, level: _solarize(images, 256 - (256 * level).floor()),
    "SolarizeAdd": lambda images, level: torch.where(
        images < 128, images + (110 * level).clamp(max=128).to(torch.uint8), images
    ),
}
WARPS = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")


def warp(images: Tensor, strengths: Sequence[Tensor], fill: Tensor) -> Tensor:
    """Rotate, shear and translate images `[B, C, H, W]` uint8, resampled bilinearly, by strengths `[B, 1, 1]`.

    At most one of an image's strengths, in the order of `WARPS`, is not zero. Points from outside are filled with
    `fill` `[C]`.
    """
    turn, shear_x, shear_y, move_x, move_y = strengths
    cos, sin = (math.radians(-30) * turn).cos(), (math.radians(-30) * turn).sin()
    height, width = images.shape[-2:]
    # Not by `affine_grid`: its matrix product may use TensorFloat32, whose three digits are too few for a position.
    x = torch.arange(width, device=images.device) + 0.5  # centers of pixels, from the upper left corner
    y = (torch.arange(height, device=images.device) + 0.5)[:, None]
    right, down = x - width / 2, y - height / 2  # from the center of the image, around which it turns
    from_x = cos * right + sin * down + width / 2 + 0.3 * shear_x * y + 0.45 * width * move_x  # [B, H, W]
    from_y = cos * down - sin * right + height / 2 + 0.3 * shear_y * x + 0.45 * height * move_y
    grid = torch.stack([from_x * (2 / width) - 1, from_y * (2 / height) - 1], dim=-1)  # from -1 to 1 within the image
    taken = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    inside = (grid.abs() <= 1).all(-1)
    return torch.where(inside[:, None], taken, fill[:, None, None]).round().to(torch.uint8)


class RandAugment(Step):
    """Some operations, chosen at random, on images of bytes."""

    purpose = "RandAugment"
    fill: Tensor

    def __init__(self, description: str, *, mean: Sequence[float]):
        """Read timm's description; ValueError if batches cannot take it. The mean fills what a warp leaves empty."""
        super().__init__()
        if (reason := unsupported_policy(description)) is not None:
            raise ValueError(f"{description!r} {reason}")
        policy = _read_policy(description)
        first = policy.ops[0]
        self._names = [operation.name for operation in policy.ops]
        self._increasing = any(name.endswith("Increasing") for name in self._names)
        self._layers, self._probability, self._magnitude = policy.num_layers, first.prob, float(first.magnitude)
        self._spread, self._largest = first.magnitude_std, first.magnitude_max or LARGEST_MAGNITUDE
        self.register_buffer("fill", torch.tensor([float(min(255, round(255 * value))) for value in mean]))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw for each layer the operation, from 1, or 0 for none; its strength; the strength with a sign."""
        columns: list[Tensor] = []
        for _ in range(self._layers):
            chosen = torch.randint(len(self._names), (count,), generator=generator)
            is_done = torch.rand(count, generator=generator) < self._probability
            sign = torch.where(torch.rand(count, generator=generator) < 0.5, 1.0, -1.0)
            level = self._draw_magnitudes(count, generator) / LARGEST_MAGNITUDE
            columns += [(1.0 + chosen) * is_done, level, level * sign]
        return torch.stack(columns, dim=1)

    def _draw_magnitudes(self, count: int, generator: torch.Generator) -> Tensor:
        if math.isinf(self._spread):  # timm's way to ask for any up to the one that is named
            return torch.rand(count, generator=generator) * min(self._magnitude, self._largest)
        magnitudes = self._magnitude + self._spread * torch.randn(count, generator=generator)
        return magnitudes.clamp(0, self._largest)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Recolor or warp, layer by layer.

        All operations are computed for all images: to find those that need one, the CPU would wait for the GPU.
        """
        for layer in plan.chunk(self._layers, dim=1):
            chosen, level, signed = layer[..., None, None, None].unbind(1)
            duller = images.float()
            for number, name in self._numbered(BLENDS):
                duller = torch.where(chosen == number, BLENDS[name](images), duller)
            # An increasing factor moves away from 1 with the strength, on either side.
            factors = (1 + 0.9 * signed).clamp(min=0.1) if self._increasing else 0.1 + 1.8 * level
            images = blend(images, duller, factors)
            for number, name in self._numbered(RECOLORING):
                images = torch.where(chosen == number, RECOLORING[name](images, level), images)
            warps: dict[str, Tensor] = dict.fromkeys(WARPS, torch.zeros_like(signed[:, 0]))
            for number, name in self._numbered(WARPS):
                warps[name] = torch.where(chosen == number, signed, 0.0)[:, 0]
            images = warp(images, list(warps.values()), self.fill)
        return images

    def _numbered(self, names: Collection[str]) -> list[tuple[int, str]]:
        return [(number, name) for number, name in enumerate(self._names, start=1) if name in names]


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
    if policy.choice_weights is not None or not {step.name for step in policy.ops} <= {*BLENDS, *RECOLORING, *WARPS}:
        return "chooses from a set of its own, which whole batches cannot; leave its part that starts with t out"
    return None


class RandomErasing(Step):
    """Fills rectangles of normalized images with noise ("pixel"), one random color each ("rand"), or zeros ("const").

    An image has from 1 to `largest_count` rectangles, which are the smaller the more there are.
    """

    purpose = "erasing"
    noise: Tensor

    def __init__(self, probability: float, *, size: tuple[int, int], mode: EraseMode, largest_count: int):
        super().__init__()
        self._probability, self._size, self._mode, self._largest_count = probability, size, mode, largest_count
        generator = torch.Generator().manual_seed(derived_seed("noise"))
        self.register_buffer("noise", torch.randn(NOISE_VALUES, generator=generator))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw a place in the noise, then top, bottom, left and right of each rectangle; missing ones are empty.

        Where a rectangle does not fit timm tries others; here it is cut to fit, which is rare.
        """
        rectangles = self._largest_count
        place = torch.randint(NOISE_VALUES, (count, 1), generator=generator)
        erased = torch.rand(count, 1, generator=generator) < self._probability
        wanted = torch.randint(1, rectangles + 1, (count, 1), generator=generator)
        share, aspect, down, right = torch.rand(4, count, rectangles, generator=generator)
        height, width = self._size
        area = height * width * (SMALLEST_ERASED + (LARGEST_ERASED - SMALLEST_ERASED) * share) / wanted
        aspect = torch.exp(math.log(LARGEST_ASPECT) * (2 * aspect - 1))
        present = erased & (torch.arange(rectangles) < wanted)
        tall = (area * aspect).sqrt().round().clamp(max=height - 1) * present
        wide = (area / aspect).sqrt().round().clamp(max=width - 1) * present
        top = (down * (height - tall + 1)).floor()
        left = (right * (width - wide + 1)).floor()
        corners = torch.stack([top, top + tall, left, left + wide], dim=2)  # [N, R, 4]
        return torch.cat([place, corners.flatten(1)], dim=1)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Fill the rectangles."""
        height, width = images.shape[2:]
        rows = torch.arange(height, device=images.device)[:, None]
        columns = torch.arange(width, device=images.device)
        corners = plan[:, 1:].view(len(plan), -1, 4)
        fills = self._fills(plan[:, 0].long(), images.shape).to(images.dtype)
        for rectangle in range(self._largest_count):
            top, bottom, left, right = corners[:, rectangle, :, None, None].unbind(1)
            inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)  # [B, H, W]
            images = torch.where(inside[:, None], fills[:, rectangle], images)
        return images

    def _fills(self, places: Tensor, shape: torch.Size) -> Tensor:
        """Return the fill of rectangles, `[B, R, C, H or 1, W or 1]`."""
        count, channels = self._largest_count, shape[1]
        if self._mode == "pixel":
            return self.noise_from(places, (1, *shape[1:])).expand(-1, count, -1, -1, -1)
        if self._mode == "rand":
            return self.noise_from(places, (count, channels, 1, 1))
        return self.noise.new_zeros(len(places), count, channels, 1, 1)

    def noise_from(self, places: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Read noise `[B, *shape]` of zero mean and unit variance from a table, each row from a place `[B]` on."""
        positions = places[:, None] + torch.arange(math.prod(shape), device=places.device)
        return self.noise[positions % NOISE_VALUES].view(-1, *shape)
