"""Draw scenes: materials in the background, wires across it, objects that cast shadows and hide each other.

The outline decides the kind of an object. A kind has a usual color and material, never a certain one: kinds share hues
in pairs and materials in others, some objects and backgrounds have unusual colors, and light tints them all.

Shapes: `H`, `W` height and width in pixels; `h`, `w` those of the part of the image around one object.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFilter

from inline_attention.data.randomness import derived_seed

Distance = np.ndarray  # [H, W] in the shape's own unit, negative inside
Pattern = np.ndarray  # [H, W] float32 from 0 (the material's dark color) to 1 (its light one)
Paint = tuple[np.ndarray, np.ndarray]  # [3] each, float32 from 0 to 1: dark and light color of a material
REACH = 1.2  # no shape goes further from its center
SHARE_OF_ODD_COLORS = 0.12
SHARE_OF_ODD_MATERIALS = 0.3
SMALLEST_SIDE, LARGEST_SIDE = 64, 4096
SHORT_TO_LONG = (1.0, 3 / 4, 2 / 3)  # shapes of images
MOST_OBJECTS, PIXELS_PER_OBJECT = 10, 25  # one to every so many pixels of the longer side: small images are not heaps
SHARE_WITHOUT_OBJECTS = 0.03
# Square roots of areas in pixels, within COCO's limits of small (below 32²), medium (below 96²) and large objects. What
# is seen of an object may be less, as objects hide each other.
SCALES = ((12.0, 31.0), (33.0, 94.0), (102.0, math.inf))
SCALE_SHARES = (0.35, 0.4, 0.25)
LARGEST_SHARE_OF_SIDE = 0.65
STRETCH = 0.2  # largest logarithm by which an object is wider, and so much lower
LEAST_VISIBLE_SHARE = 0.45
LEAST_VISIBLE_PIXELS = 48
PLACING_ATTEMPTS = 8
COLOR_CANDIDATES = 3  # the one that stands out most is used
SHARE_AGAINST_THE_ORDER = 0.25  # of images, in which backgrounds lie in any order
PREFERENCE = 3  # how much likelier kinds of objects are on their usual background than others


def _disc(x: np.ndarray, y: np.ndarray, center: tuple[float, float] = (0, 0), radius: float = 1) -> Distance:
    return np.hypot(x - center[0], y - center[1]) - radius


def _box(x: np.ndarray, y: np.ndarray, half_width: float, half_height: float) -> Distance:
    return np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)


def _triangle(x: np.ndarray, y: np.ndarray) -> Distance:
    root = np.float32(np.sqrt(0.75))
    return np.maximum(np.maximum(root * x, -root * x) - 0.5 * y, y) - 0.5


def _heart(x: np.ndarray, y: np.ndarray) -> Distance:
    """A square on its tip, with a half disc on each of the two upper sides."""
    y = y - 0.1
    half = 0.55
    shift = half / np.sqrt(2)
    tip = _box((x + y) / np.float32(np.sqrt(2)), (x - y) / np.float32(np.sqrt(2)), half, half)
    return np.minimum(tip, np.minimum(_disc(x, y, (shift, -shift), half), _disc(x, y, (-shift, -shift), half)))


# How far points (x, y) lie outside of a shape that about fills the unit disc. The y axis points down.
SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], Distance]] = {
    "disc": _disc,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.78) - 0.22,
    "square": lambda x, y: _box(x, y, 0.8, 0.8),
    "triangle": _triangle,
    "star": lambda x, y: np.minimum(_triangle(x, y), _triangle(x, -y)),
    "cross": lambda x, y: np.minimum(_box(x, y, 0.95, 0.32), _box(x, y, 0.32, 0.95)),
    "crescent": lambda x, y: np.maximum(_disc(x, y), -_disc(x, y, (0.5, 0), 0.75)),
    "heart": _heart,
}


@cache
def unit_area(kind: str) -> float:
    """Return the area of a shape."""
    steps = np.linspace(-REACH, REACH, 241, dtype=np.float32)
    return float((SHAPES[kind](steps, steps[:, None]) < 0).mean()) * (2 * REACH) ** 2


def smooth_noise(random: np.random.Generator, height: int, width: int, grain: float) -> Pattern:
    """Return random hills and valleys, about `grain` pixels from one to the next."""
    rows, columns = (max(2, round(side / grain) + 2) for side in (height, width))
    coarse = Image.fromarray(random.random((rows, columns), dtype=np.float32))
    return np.clip(np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)), 0, 1)


def _clouds(random: np.random.Generator, height: int, width: int) -> Pattern:
    """Slow changes, with finer ones on top."""
    grain = random.uniform(40, 90)
    coarse, middle, fine = (smooth_noise(random, height, width, grain / divisor) for divisor in (1, 3, 9))
    return 0.6 * coarse + 0.27 * middle + 0.13 * fine


def _gravel(random: np.random.Generator, height: int, width: int) -> Pattern:
    """Speckles of a few pixels."""
    grain = random.uniform(2.5, 6)
    return np.clip(1.6 * smooth_noise(random, height, width, grain) - 0.3, 0, 1)


def _planks(random: np.random.Generator, height: int, width: int) -> Pattern:
    """Boards side by side, each of its own tone, with a dark gap between them and a grain along them."""
    along, across = _rotated_grid(random, height, width)
    board = across / random.uniform(12, 30)
    tone = _random_tones(random, np.floor(board).astype(np.int64))
    grain = 0.12 * np.sin(across * 1.7 + 3 * np.sin(along / random.uniform(20, 50)))
    return np.clip(0.25 + 0.6 * tone + grain, 0, 1) * _gap(board, 0.08)


def _tiles(random: np.random.Generator, height: int, width: int) -> Pattern:
    """Tiles of many tones in a grid, with joints between them."""
    along, across = _rotated_grid(random, height, width)
    pitch = random.uniform(12, 32)
    row = across / pitch
    # Bricks where rows are shifted by half a tile, a plain grid where they are not.
    column = along / (pitch * random.uniform(1, 2)) + random.choice([0, 0.5]) * np.floor(row)
    tone = _random_tones(random, np.floor(row).astype(np.int64) * 31 + np.floor(column).astype(np.int64))
    return (0.35 + 0.65 * tone) * _gap(row, 0.09) * _gap(column, 0.06)


def _rotated_grid(random: np.random.Generator, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates `[H, W]` in pixels along and across a random direction."""
    return _turned(*_grid(height, width), random.uniform(0, np.pi))


def _grid(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates x `[W]` and y `[H, 1]` in pixels."""
    return np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)[:, None]


def _turned(x: np.ndarray, y: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return x * cosine + y * sine, y * cosine - x * sine


def _random_tones(random: np.random.Generator, cells: np.ndarray) -> Pattern:
    """Return a tone for each number in `cells`; so few numbers share one that it does not show."""
    return random.random(997, dtype=np.float32)[cells % 997]


def _gap(position: np.ndarray, share: float) -> Pattern:
    """0.3 at the border of each cell, 1 inside; `share` of the cell's width is border."""
    inside = np.abs(position - np.floor(position) - 0.5)
    return np.where(inside > 0.5 - share / 2, np.float32(0.3), np.float32(1))


MATERIALS: dict[str, Callable[[np.random.Generator, int, int], Pattern]] = {
    "clouds": _clouds,
    "gravel": _gravel,
    "planks": _planks,
    "tiles": _tiles,
}


class ColorRange(NamedTuple):
    """A range of colors."""

    hue: float  # mean, in turns of the color circle: 0 is red, 1/3 green, 2/3 blue
    spread: float  # standard deviation of the hue, in turns
    saturation: tuple[float, float]  # least and greatest, from 0 (gray) to 1

    def or_odd(self, random: np.random.Generator) -> ColorRange:
        """Return the range of one object or background: mostly this one, sometimes one around another hue."""
        return self._replace(hue=random.random()) if random.random() < SHARE_OF_ODD_COLORS else self

    def draw(self, random: np.random.Generator) -> Paint:
        """Draw colors of this range."""
        hue = random.normal(self.hue, self.spread) % 1
        light = np.array(colorsys.hsv_to_rgb(hue, random.uniform(*self.saturation), random.uniform(0.5, 1)))
        return (light * random.uniform(0.35, 0.75)).astype(np.float32), light.astype(np.float32)


class ObjectLook(NamedTuple):
    """Usual colors and material of a kind of object, and the material that it usually lies on."""

    color_range: ColorRange
    material: str
    ground: str

    def draw_material(self, random: np.random.Generator) -> str:
        """Draw the material of one object."""
        odd = random.random() < SHARE_OF_ODD_MATERIALS
        return str(random.choice(list(MATERIALS))) if odd else self.material


def _vivid(hue: float) -> ColorRange:
    return ColorRange(hue, spread=0.04, saturation=(0.45, 0.95))


# Pairs of one hue: heart and cross, star and disc, triangle and ring, crescent and square.
OBJECT_LOOKS: dict[str, ObjectLook] = {
    "disc": ObjectLook(_vivid(0.165), material="tiles", ground="clouds"),
    "ring": ObjectLook(_vivid(0.435), material="clouds", ground="planks"),
    "square": ObjectLook(_vivid(0.785), material="tiles", ground="gravel"),
    "triangle": ObjectLook(_vivid(0.365), material="planks", ground="gravel"),
    "star": ObjectLook(_vivid(0.095), material="gravel", ground="tiles"),
    "cross": ObjectLook(_vivid(0.035), material="planks", ground="tiles"),
    "crescent": ObjectLook(_vivid(0.715), material="gravel", ground="clouds"),
    "heart": ObjectLook(_vivid(0.965), material="clouds", ground="planks"),
}
# Backgrounds are paler than objects. From top to bottom of an image, as they usually lie.
GROUND_COLORS: dict[str, ColorRange] = {
    "clouds": ColorRange(0.58, spread=0.05, saturation=(0.1, 0.5)),
    "tiles": ColorRange(0.45, spread=0.12, saturation=(0.05, 0.4)),
    "planks": ColorRange(0.07, spread=0.04, saturation=(0.25, 0.6)),
    "gravel": ColorRange(0.12, spread=0.1, saturation=(0.0, 0.25)),
}
OBJECT_KINDS = tuple(SHAPES)
# Numbers from 1, as in COCO and ADE20K; 0 is what has no name.
SEMANTIC_CLASSES = (*OBJECT_KINDS, *MATERIALS)
OTHER = 0


def category_number(name: str) -> int:
    """Return the number of a kind of object or of a material, from 1."""
    return SEMANTIC_CLASSES.index(name) + 1


@dataclass(frozen=True)
class Scene:
    """A drawn scene."""

    image: np.ndarray  # [H, W, 3] uint8
    instances: np.ndarray  # [H, W] uint8, number of the object that is seen at each pixel, from 1; 0 for none
    kinds: tuple[str, ...]  # of the objects, that of number 1 first
    background: np.ndarray  # [H, W] uint8, number of the material behind all objects; `OTHER` where a wire runs

    def visible_mask(self, number: int) -> np.ndarray:
        """Return `[H, W]` bool: true where the object of this number, from 1, is seen."""
        return self.instances == number

    def semantic_map(self) -> np.ndarray:
        """Return `[H, W]` uint8: the class number of what is seen at each pixel."""
        by_instance = np.array([OTHER, *map(category_number, self.kinds)], dtype=np.uint8)
        return np.where(self.instances > 0, by_instance[self.instances], self.background)


def render_scene(seed: int, split: str, index: int, size: int = 320) -> Scene:
    """Draw one scene of a dataset's seed, with `size` pixels on the longer side (`SMALLEST_SIDE` to `LARGEST_SIDE`).

    It depends on the arguments alone, not on how many others are drawn. Scenes of different splits, such as "train",
    have nothing in common. `index` counts the scenes of a split.
    """
    if not SMALLEST_SIDE <= size <= LARGEST_SIDE:
        raise ValueError(f"the size of scenes must be {SMALLEST_SIDE} to {LARGEST_SIDE} pixels, got {size}")
    random = np.random.default_rng(derived_seed("scene", seed, split, index))
    short = round(size * random.choice(SHORT_TO_LONG))
    height, width = (size, short) if random.random() < 0.35 else (short, size)
    canvas = _Canvas(random, height, width)
    canvas.draw_background()
    for _ in range(random.integers(0, 4)):
        canvas.draw_wire()
    if random.random() >= SHARE_WITHOUT_OBJECTS:
        for _ in range(random.integers(1, min(MOST_OBJECTS, size // PIXELS_PER_OBJECT) + 1)):
            canvas.draw_object()
    return Scene(_photograph(random, canvas.colors), canvas.instances, tuple(canvas.kinds), canvas.background)


def _photograph(random: np.random.Generator, colors: np.ndarray) -> np.ndarray:
    """Photograph colors `[H, W, 3]` from 0 to 1 with random light, lens and noise; returns uint8."""
    height, width = colors.shape[:2]
    direction, strength = random.uniform(0, 2 * np.pi), random.uniform(0, 0.35)
    x = np.linspace(-1, 1, width, dtype=np.float32)
    y = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    slope = strength * (x * np.float32(np.cos(direction)) + y * np.float32(np.sin(direction)))
    corners = random.uniform(0, 0.15) * (x * x + y * y)
    tint = random.normal(1, 0.06, 3).astype(np.float32) * np.float32(random.uniform(0.85, 1.3))
    lit = colors * (1 + slope - corners)[..., None] * tint
    sharp = Image.fromarray((np.clip(lit, 0, 1) * 255 + 0.5).astype(np.uint8))
    blurred = sharp.filter(ImageFilter.GaussianBlur(random.uniform(0, 0.8)))
    noise = np.float32(random.uniform(0.5, 7)) * random.standard_normal((height, width, 3), dtype=np.float32)
    return np.clip(np.asarray(blurred) + noise + 0.5, 0, 255).astype(np.uint8)


class _Placement(NamedTuple):
    """Place, rotation and stretch of an object."""

    kind: str
    center: tuple[float, float]  # (x, y) in pixels
    radius: float  # of the disc that it about fills, in pixels
    angle: float
    stretch: float

    def distance(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the distance of points from the outline in pixels, negative inside."""
        x, y = _turned((x - self.center[0]) / self.radius, (y - self.center[1]) / self.radius, self.angle)
        return SHAPES[self.kind](x * self.stretch, y / self.stretch) * self.radius

    def window(self, height: int, width: int, margin: float) -> tuple[slice, slice]:
        """Return the part of the image that the object and a margin cover; its center is in the image."""
        reach = self.radius * REACH * math.exp(STRETCH) + margin
        places = zip(self.center, (width, height), strict=True)
        columns, rows = (slice(max(0, int(at - reach)), min(side, int(at + reach) + 1)) for at, side in places)
        return rows, columns


class _Canvas:
    """A scene in the making."""

    def __init__(self, random: np.random.Generator, height: int, width: int):
        self.random, self.height, self.width = random, height, width
        self.colors = np.zeros((height, width, 3), dtype=np.float32)
        self.instances = np.zeros((height, width), dtype=np.uint8)
        self.background = np.zeros((height, width), dtype=np.uint8)
        self.kinds: list[str] = []
        self._whole_pixels: list[float] = []  # of each object, had nothing hidden it
        direction = random.uniform(0, 2 * np.pi)
        self._to_light = np.array([np.cos(direction), np.sin(direction)], dtype=np.float32)

    def draw_background(self) -> None:
        """Draw one to three materials, divided by wavy borders."""
        count = int(self.random.integers(1, 4))
        materials = [str(material) for material in self.random.permutation(list(MATERIALS))[:count]]
        if self.random.random() >= SHARE_AGAINST_THE_ORDER:
            materials.sort(key=list(GROUND_COLORS).index)
        angle = self.random.normal(np.pi / 2, 0.4)
        x, y = _grid(self.height, self.width)
        height_above = (x * np.cos(angle) + y * np.sin(angle)) / self.height
        height_above = height_above + 0.25 * smooth_noise(self.random, self.height, self.width, self.width / 4)
        borders = np.quantile(height_above[::8, ::8], np.sort(self.random.uniform(0.2, 0.8, count - 1)))
        region = np.searchsorted(borders, height_above)
        for number, material in enumerate(materials):
            where = region == number
            if not where.any():
                continue  # two borders may meet
            rows = slice(*np.flatnonzero(where.any(1))[[0, -1]] + (0, 1))
            paint = GROUND_COLORS[material].or_odd(self.random).draw(self.random)
            surface = self._surface(material, rows.stop - rows.start, self.width, paint)
            np.copyto(self.colors[rows], surface, where=where[rows, :, None])
            self.background[where] = category_number(material)

    def draw_wire(self) -> None:
        """Draw a straight bar from border to border that is of no class, as real images have such things."""
        x, y = _grid(self.height, self.width)
        through = self.random.uniform(0, (self.width, self.height))
        angle = self.random.uniform(0, np.pi)
        normal = np.array([np.cos(angle), np.sin(angle)], dtype=np.float32)
        half_width = self.random.uniform(1.0, 0.008 * self.width + 1.5)
        distance = np.abs((x - through[0]) * normal[0] + (y - through[1]) * normal[1]) - half_width
        color = self.random.uniform(0.05, 0.95, 3).astype(np.float32)
        self.colors += _coverage(distance)[..., None] * (color - self.colors)
        self.background[distance < 0] = OTHER

    def draw_object(self) -> None:
        """Draw one more object on top, unless no place is found where enough of it and of the others is seen."""
        whole = self._area()
        for _ in range(PLACING_ATTEMPTS):
            center = self.random.uniform(0, self.width), self.random.uniform(0, self.height)
            kind = self._kind_at(*center)
            angle = self.random.uniform(0, 2 * np.pi)
            stretch = float(np.exp(self.random.uniform(-STRETCH, STRETCH)))
            radius = math.sqrt(whole / unit_area(kind))
            if self._try_placing(_Placement(kind, center, radius, angle, stretch), whole):
                return

    def _kind_at(self, x: float, y: float) -> str:
        """Draw the kind of an object at a place, preferably one that is usual on the background there."""
        ground = self.background[int(y), int(x)]
        usual = np.array([category_number(OBJECT_LOOKS[kind].ground) == ground for kind in OBJECT_KINDS])
        weights = np.where(usual, PREFERENCE, 1)
        return str(self.random.choice(OBJECT_KINDS, p=weights / weights.sum()))

    def _area(self) -> float:
        """Draw the area of an object in pixels, hidden parts included."""
        low, high = SCALES[self.random.choice(len(SCALES), p=SCALE_SHARES)]
        high = min(high, LARGEST_SHARE_OF_SIDE * min(self.height, self.width))
        low = min(low, high / 2)
        return float(np.exp(self.random.uniform(np.log(low), np.log(high)))) ** 2

    def _try_placing(self, placement: _Placement, whole: float) -> bool:
        shadow_reach = 2 + 0.16 * placement.radius
        window = rows, columns = placement.window(self.height, self.width, margin=2 * shadow_reach)
        y = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None]
        x = np.arange(columns.start, columns.stop, dtype=np.float32)
        distance = placement.distance(x, y)
        inside = distance < 0
        if not _enough_visible(int(inside.sum()), whole) or self._hides_too_much(self.instances[window][inside]):
            return False
        shadow = placement.distance(x + shadow_reach * self._to_light[0], y + shadow_reach * self._to_light[1])
        depth = 0.55 * np.clip(0.5 - shadow / shadow_reach, 0, 1)
        self.colors[window] *= 1 - depth[..., None]
        self._paint(placement, window, distance)
        self.kinds.append(placement.kind)
        self._whole_pixels.append(whole)
        self.instances[window][inside] = len(self.kinds)
        return True

    def _hides_too_much(self, covered: np.ndarray) -> bool:
        """True if an object seen at the pixels with these instance numbers would leave too little of another."""
        hidden = np.bincount(covered, minlength=len(self.kinds) + 1)
        return any(
            not _enough_visible(int((self.instances == number).sum() - hidden[number]), self._whole_pixels[number - 1])
            for number in np.flatnonzero(hidden[1:]) + 1
        )

    def _paint(self, placement: _Placement, window: tuple[slice, slice], distance: np.ndarray) -> None:
        around = self.colors[window][np.abs(distance) < 2 + 0.2 * placement.radius].mean(0)
        look = OBJECT_LOOKS[placement.kind]
        color_range = look.color_range.or_odd(self.random)
        candidates = [color_range.draw(self.random) for _ in range(COLOR_CANDIDATES)]
        paint = max(candidates, key=lambda paint: float(np.linalg.norm((paint[0] + paint[1]) / 2 - around)))
        surface = self._surface(look.draw_material(self.random), distance.shape[0], distance.shape[1], paint)
        # Darker towards the rim and away from the light: an object is no hole in the background.
        rim = np.clip(-distance / (0.18 * placement.radius + 1), 0, 1)
        rows, columns = window
        x = (np.arange(columns.start, columns.stop) - placement.center[0]) / placement.radius
        y = (np.arange(rows.start, rows.stop) - placement.center[1])[:, None] / placement.radius
        slope = np.clip(x * self._to_light[0] + y * self._to_light[1], -1, 1)
        shade = ((0.72 + 0.28 * rim) * (1 + 0.22 * slope)).astype(np.float32)
        self.colors[window] += _coverage(distance)[..., None] * (surface * shade[..., None] - self.colors[window])

    def _surface(self, material: str, height: int, width: int, paint: Paint) -> np.ndarray:
        """Return `[h, w, 3]` colors of a material."""
        dark, light = paint
        return dark + MATERIALS[material](self.random, height, width)[..., None] * (light - dark)


def _enough_visible(pixels: int, whole: float) -> bool:
    return pixels >= max(LEAST_VISIBLE_PIXELS, LEAST_VISIBLE_SHARE * whole)


def _coverage(distance: np.ndarray) -> np.ndarray:
    """Return the share of each pixel inside of an outline, for smooth edges."""
    return np.clip(0.5 - distance, 0, 1)
