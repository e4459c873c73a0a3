import colorsys
import json
import os
import signal
import sys
import time

import numpy as np
import pytest
from PIL import Image

import warm
from inline_attention.data.coco.annotations import read_annotations
from inline_attention.data.coco.checks import check_annotations
from inline_attention.data.coco.masks import decode_mask
from inline_attention.data.images import load_image
from inline_attention.data.scenes import OBJECT_KINDS, SEMANTIC_CLASSES, ScenesPlan, render_scene, write_scenes
from inline_attention.data.scenes.rendering import (
    GROUND_COLORS,
    LEAST_VISIBLE_PIXELS,
    MATERIALS,
    OBJECT_LOOKS,
    REACH,
    SHAPES,
    category_number,
)
from inline_attention.data.scenes.writing import MANIFEST, leftovers
from inline_attention.data.segmentation import open_and_check_pairs
from inline_attention.data.sources import DataError

PLAN = ScenesPlan(images=6, validation_images=2, size=96, seed=3)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("scenes") / "dataset", PLAN)


def test_a_scene_depends_on_its_arguments_alone():
    first = render_scene(0, "training", 5, 96)
    np.random.rand(3)
    render_scene(0, "training", 4, 96)
    again = render_scene(0, "training", 5, 96)
    assert (first.image == again.image).all()
    assert (first.semantic_map() == again.semantic_map()).all()
    for other in (render_scene(1, "training", 5, 96), render_scene(0, "validation", 5, 96)):
        assert other.image.shape != first.image.shape or (other.image != first.image).any()


def test_scenes_vary_in_what_is_to_be_learnt():
    scenes = [render_scene(0, "training", index, 320) for index in range(40)]
    areas = np.array([scene.visible_mask(n + 1).sum() for scene in scenes for n in range(len(scene.kinds))])
    for share in (areas < 32**2, (areas >= 32**2) & (areas < 96**2), areas >= 96**2):
        assert share.mean() > 0.05
    assert {kind for scene in scenes for kind in scene.kinds} == set(OBJECT_KINDS)
    assert {scene.image.shape[0] > scene.image.shape[1] for scene in scenes} == {False, True}
    labels = np.unique(np.concatenate([scene.semantic_map().ravel() for scene in scenes]))
    assert labels.tolist() == list(range(len(SEMANTIC_CLASSES) + 1))
    assert sum(_overlap(scene) for scene in scenes) > 10


@pytest.fixture(scope="module")
def crowd():
    """Scenes enough to count in."""
    return [render_scene(0, "training", index, 160) for index in range(150)]


def test_everything_that_is_drawn_has_a_look():
    assert set(OBJECT_LOOKS) == set(OBJECT_KINDS)
    assert set(GROUND_COLORS) == set(MATERIALS)
    assert {name for look in OBJECT_LOOKS.values() for name in (look.material, look.ground)} <= set(MATERIALS)


def test_colours_hint_at_kinds_without_telling_them(crowd):
    """Of photographed objects: the kind whose usual hue is nearest is the right one more often than not, not always."""
    hues = np.array([OBJECT_LOOKS[kind].color_range.hue for kind in OBJECT_KINDS])
    guessed, kinds = [], []
    for scene in crowd:
        for number, kind in enumerate(scene.kinds, start=1):
            red, green, blue = np.median(scene.image[scene.visible_mask(number)], axis=0) / 255
            distance = np.abs(colorsys.rgb_to_hsv(red, green, blue)[0] - hues)
            guessed.append(OBJECT_KINDS[np.minimum(distance, 1 - distance).argmin()])
            kinds.append(kind)
    right = np.mean([guess == kind for guess, kind in zip(guessed, kinds, strict=True)])
    assert 0.4 < right < 0.85
    assert len(kinds) > 300
    for kind in OBJECT_KINDS:
        assert len({guess for guess, other in zip(guessed, kinds, strict=True) if other == kind}) > 2


def test_surroundings_hint_too(crowd):
    """More than a quarter of objects, as it were by chance, lie on their usual background of four; clouds are up."""
    on_usual_ground, cloud_rows, gravel_rows = [], [], []
    for scene in crowd:
        for number, kind in enumerate(scene.kinds, start=1):
            ground = scene.background == category_number(OBJECT_LOOKS[kind].ground)
            on_usual_ground.append(ground[scene.visible_mask(number)].mean() > 0.5)
        for name, rows in (("clouds", cloud_rows), ("gravel", gravel_rows)):
            where = scene.background == category_number(name)
            if 0.05 < where.mean() < 0.9:
                rows.append(np.nonzero(where)[0].mean() / len(where))
    assert 0.35 < np.mean(on_usual_ground) < 0.7
    assert np.mean(cloud_rows) < 0.4 < 0.6 < np.mean(gravel_rows)
    assert max(cloud_rows) > 0.6
    assert min(gravel_rows) < 0.4


@pytest.mark.parametrize(("size", "most"), [(64, 2), (128, 5), (320, 10)])
def test_small_pictures_are_no_heaps(size, most):
    assert max(len(render_scene(1, "training", index, size).kinds) for index in range(40)) in (most - 1, most)


def _overlap(scene):
    """Whether two objects meet: of such, one hides a part of the other."""
    left, right = scene.instances[:, :-1], scene.instances[:, 1:]
    return ((left != right) & (left > 0) & (right > 0)).any()


@pytest.mark.parametrize("size", [64, 97, 200])
def test_every_annotated_object_is_seen_and_every_object_annotated(size):
    for index in range(25):
        scene = render_scene(7, "training", index, size)
        assert max(scene.image.shape) == size
        assert set(np.unique(scene.instances)) - {0} == set(range(1, len(scene.kinds) + 1))
        semantic = scene.semantic_map()
        for number, kind in enumerate(scene.kinds, start=1):
            mask = scene.visible_mask(number)
            assert mask.sum() >= LEAST_VISIBLE_PIXELS
            assert (semantic[mask] == category_number(kind)).all()


@pytest.mark.parametrize("kind", OBJECT_KINDS)
def test_shapes_lie_within_reach_and_differ(kind):
    steps = np.linspace(-2, 2, 201, dtype=np.float32)
    inside = SHAPES[kind](steps, steps[:, None]) < 0
    assert inside.any()
    assert np.hypot(steps, steps[:, None])[inside].max() <= REACH
    for other in set(OBJECT_KINDS) - {kind}:
        another = SHAPES[other](steps, steps[:, None]) < 0
        assert (inside & another).sum() < 0.9 * (inside | another).sum()


def test_sizes_out_of_range():
    with pytest.raises(ValueError, match="64 to 4096 pixels, got 63"):
        render_scene(0, "training", 0, 63)
    with pytest.raises(ValueError, match="at least one image"):
        ScenesPlan(images=0)


def test_written_annotations_are_those_of_the_scene(dataset):
    annotations = read_annotations(dataset / "annotations" / "instances_train.json")
    assert annotations.class_names == OBJECT_KINDS
    assert len({item.id for item in annotations.objects}) == len(annotations.objects)
    for index, image in enumerate(annotations.images):
        scene = render_scene(PLAN.seed, "training", index, PLAN.size)
        picture = load_image(dataset / "images" / "training" / image.file_name)
        assert picture.size == (image.width, image.height)
        assert np.abs(np.asarray(picture).astype(int) - scene.image).mean() < 8  # JPEG, and noise
        written = np.asarray(Image.open(dataset / "annotations" / "training" / f"{index:06d}.png"))
        assert (written == scene.semantic_map()).all()
        objects = [item for item in annotations.objects if item.image_id == image.id]
        assert [item.category_id for item in objects] == [category_number(kind) for kind in scene.kinds]
        for number, item in enumerate(objects, start=1):
            mask = decode_mask(item.segmentation, image.height, image.width)
            assert (mask == scene.visible_mask(number)).all()
            assert item.area == mask.sum()
    checked = check_annotations(annotations, dataset / "images" / "training", every_category=False)
    assert checked.report.problems == []


def test_written_maps_are_a_segmentation_dataset(dataset):
    opened = open_and_check_pairs(dataset, reduce_zero_label=True)
    assert [finding.fault for report in opened.reports for finding in report] in ([], ["classes without a pixel"])
    assert (dataset / "classes.txt").read_text().split() == list(SEMANTIC_CLASSES)
    assert Image.open(dataset / "preview.png").format == "PNG"
    assert json.loads((dataset / MANIFEST).read_text())["seed"] == PLAN.seed


def test_more_pictures_leave_the_others_as_they_are(dataset, tmp_path):
    other = write_scenes(tmp_path / "more", ScenesPlan(images=8, validation_images=3, size=96, seed=3))
    for file in sorted((dataset / "images").rglob("*.jpg")):
        assert file.read_bytes() == (other / file.relative_to(dataset)).read_bytes()


def test_what_is_there_is_not_overwritten_unasked(tmp_path):
    small = ScenesPlan(images=1, validation_images=1, size=64)
    folder = write_scenes(tmp_path / "scenes", small)
    (folder / "mine.txt").write_text("notes")
    with pytest.raises(DataError, match="already holds scenes; give another folder, or overwrite"):
        write_scenes(folder, small)
    write_scenes(folder, ScenesPlan(images=2, validation_images=1, size=64), overwrite=True)
    assert len(list((folder / "images" / "training").iterdir())) == 2
    assert not (folder / "mine.txt").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="holds something else than scenes, and is left alone"):
        write_scenes(tmp_path / "home", small, overwrite=True)
    with pytest.raises(DataError, match="is a file"):
        write_scenes(tmp_path / "home" / "thesis.txt", small, overwrite=True)
    (tmp_path / "empty").mkdir()
    assert (write_scenes(tmp_path / "empty", small) / MANIFEST).exists()


def test_an_error_leaves_nothing_and_the_old_as_it_was(tmp_path):
    small = ScenesPlan(images=2, validation_images=1, size=64)
    folder = write_scenes(tmp_path / "scenes", small)
    before = sorted((file, file.stat().st_mtime_ns) for file in folder.rglob("*"))

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_scenes(folder, small, overwrite=True, on_progress=interrupt)
    assert sorted((file, file.stat().st_mtime_ns) for file in folder.rglob("*")) == before
    assert leftovers(folder) == []


def test_a_killed_generation_is_known_as_unfinished(tmp_path):
    folder = tmp_path / "scenes"
    program = (
        "import sys; from inline_attention.data.scenes import ScenesPlan, write_scenes; "
        "write_scenes(sys.argv[1], ScenesPlan(images=100_000, size=64))"
    )
    process = warm.Popen([sys.executable, "-c", program, str(folder)])
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".unfinished-scenes-*/images/training/*.jpg")) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not folder.exists()
    assert len(leftovers(folder)) == 1
    write_scenes(folder, ScenesPlan(images=1, validation_images=1, size=64), overwrite=True)
    assert leftovers(folder) == []
    assert (folder / MANIFEST).exists()


@pytest.mark.slow
def test_processes_write_the_same(tmp_path):
    plan = ScenesPlan(images=60, validation_images=6, size=64)
    one = write_scenes(tmp_path / "one", plan)
    counted = []
    two = write_scenes(tmp_path / "two", plan, workers=2, on_progress=lambda: counted.append(1))
    assert len(counted) == 66
    files = [file for file in sorted(one.rglob("*")) if file.is_file()]
    assert len(files) == 2 * 66 + 5
    for file in files:
        assert file.read_bytes() == (two / file.relative_to(one)).read_bytes()


@pytest.mark.parametrize(
    "content", [b"[" * 50_000, b'{"kind": "inline scenes"' + b" " * 2**20 + b"}", b"\xff\xfe", None]
)
def test_a_manifest_of_a_stranger_does_not_allow_to_overwrite(tmp_path, content):
    if content is None:
        os.mkfifo(tmp_path / MANIFEST)
    else:
        (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(DataError, match="something else than scenes"):
        write_scenes(tmp_path, PLAN, overwrite=True)


def test_a_folder_whose_name_is_a_pattern_or_a_link(tmp_path):
    (tmp_path / ".unfinished-scenes-1").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "s[c]*").symlink_to("real")
    assert leftovers(tmp_path / "s*") == []
    write_scenes(tmp_path / "s[c]*", ScenesPlan(images=1, validation_images=1, size=64), overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".unfinished-scenes-1", "real", "s[c]*"]
    assert (tmp_path / "real" / MANIFEST).is_file()
