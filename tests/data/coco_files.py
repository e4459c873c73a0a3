"""Small datasets in the COCO format."""

import json

import numpy as np

from data.conftest import noise

SQUARE = [10.0, 10.0, 30.0, 10.0, 30.0, 30.0, 10.0, 30.0]


def some_mask(seed=0, size=(40, 48)):
    mask = np.zeros(size, dtype=np.uint8)
    random = np.random.default_rng(seed)
    for _ in range(3):
        top, left = random.integers(0, 20, 2)
        mask[top : top + 12, left : left + 15] ^= 1
    return mask


def annotation(number, image_id=1, category_id=7, box=(10, 10, 20, 20), segmentation=None, **others):
    return {
        "id": number,
        "image_id": image_id,
        "category_id": category_id,
        "bbox": list(box),
        "area": 400.0,
        "iscrowd": 0,
        "segmentation": [SQUARE] if segmentation is None else segmentation,
        **others,
    }


def write_coco(root, annotations, images=3, split="train", **others):
    """Images 1.jpg, … of 48×40 pixels, with categories 3, 7 and 90."""
    folder = root / f"{split}2017"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, images + 1):
        noise(number).save(folder / f"{number}.jpg")
    content = {
        "images": [{"id": n, "file_name": f"{n}.jpg", "height": 40, "width": 48} for n in range(1, images + 1)],
        "categories": [{"id": 90, "name": "kite"}, {"id": 3, "name": "car"}, {"id": 7, "name": "train"}],
        "annotations": annotations,
        **others,
    }
    file = root / "annotations" / f"instances_{split}2017.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))
    return file
