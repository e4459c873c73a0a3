"""The page that runs a classifier: complete, safe from the names in it, and equal to PyTorch in a real browser."""

import base64
import gzip
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from inline_attention import attention_weights, create_model
from inline_attention.analysis import web_page
from inline_attention.analysis.web_page import WithFeatures, global_layers, share_weights, twin
from inline_attention.support.figures import DARK, LIGHT
from inline_attention.tasks.classification.export import onnx_runner
from inline_attention.tasks.classification.prediction import ImageClassifier

HOSTILE = "</script><img src=x onerror=alert(1)>@SCRIPT@\u2028\x00"
NAMES = ["cat", HOSTILE, "dog <b>", "a very long name of a class " * 100]
ARGUMENTS = {"embed_dim": 16, "num_heads": 2, "depth": 1, "patch_size": 4, "img_size": 32, "num_classes": len(NAMES)}


def picture(height, width, seed=0):
    """Return a smooth picture with noise, as photographs are."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    return Image.fromarray(np.clip(smooth + generator.integers(-20, 20, smooth.shape), 0, 255).astype(np.uint8))


def classifier_of(name="inline_deit_tiny", **arguments):
    torch.manual_seed(1)
    model = create_model(name, **(ARGUMENTS | arguments)).eval()
    for parameter in model.parameters():  # scores and weights that differ visibly
        torch.nn.init.normal_(parameter, std=0.3)
    return ImageClassifier(model, NAMES, device="cpu", native_size=(32, 32), crop_pct=0.875)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web_page, "LARGEST_SIDE", 128)
        patch.setattr(web_page, "MOST_SOFTMAX_BYTES", 4 * 2 * 1000**2)  # so that 1025 tokens are too many
        classifier = classifier_of()
        folder = tmp_path_factory.mktemp("web") / "page"
        examples = [("first </script>", picture(37, 48)), ("photo", picture(300, 200, 1))]
        images = torch.stack([classifier.prepare_image(image) for _, image in examples])
        results = web_page.export_page(classifier, folder, images, None, examples)
    return classifier, folder, results


def settings_of(folder):
    page = (folder / "index.html").read_text(encoding="utf-8")
    (text,) = re.findall(r'<script type="application/json" id="settings">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(text)


def delivered(folder, name):
    text = (folder / "data" / f"{name}.js").read_text()
    found = re.findall(r'deliver\("([\w.-]+)", "([\w+/=]+)"\);', text)
    return {key: gzip.decompress(base64.b64decode(value)) for key, value in found}


def test_the_folder_is_complete(written):
    _, folder, results = written
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*")) == [
        "data/cost.js", "data/model.js", "data/runtime.js", "index.html",
        "licenses/onnxruntime-web-LICENSE.txt", "licenses/onnxruntime-web-ThirdPartyNotices.txt",
    ]  # fmt: skip
    assert [result.name for result in results] == ["PyTorch", "ONNX"]
    assert results[1].difference < 1e-4
    assert delivered(folder, "runtime")["runtime.wasm"][:4] == b"\0asm"
    settings = settings_of(folder)
    assert [stop["tokens"] for stop in settings["cost"]["stops"]] == [65, 257, 1025]
    assert settings["cost"]["stops"][2]["softmax_bytes"] == 4 * 2 * 1025**2
    assert [kind["kind"] for kind in settings["cost"]["kinds"]] == ["inline", "softmax"]
    assert [(layer["rows"], layer["columns"], layer["prefix"]) for layer in settings["layers"]] == [(8, 8, 1)]


def test_names_are_data_and_the_page_fetches_nothing(written):
    page = (written[1] / "index.html").read_text(encoding="utf-8")
    assert page.count("</script>") == 3
    assert "onerror" not in page.replace("script.onerror", "").replace("worker.onerror", "").replace("x onerror", "", 1)
    assert "<img src=x" not in page
    assert "\u2028" not in page
    assert "\\u0000" not in page, "control characters are shown escaped"
    assert settings_of(written[1])["class_names"][1].startswith("</script>")
    assert "default-src 'none'" in page
    assert not re.search(r"@[A-Z]+@", page.replace("@SCRIPT@", "", 1))
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    for colors in (LIGHT, DARK):
        assert f"--inline: {colors['inline']}; --softmax: {colors['softmax']};" in page


def test_the_runtime_is_the_one_that_its_facts_name(monkeypatch):
    facts = web_page.runtime_facts()
    assert (facts["name"], facts["license"]) == ("onnxruntime-web", "MIT")
    files = web_page.read_runtime()
    assert set(files) == set(facts["sha256"])
    assert f"ONNX Runtime Web v{facts['version']}".encode() in files["ort.wasm.bundle.min.mjs"][:100]
    monkeypatch.setattr(web_page, "runtime_facts", lambda: {"sha256": dict.fromkeys(facts["sha256"], "0")})
    with pytest.raises(ValueError, match="install the package again"):
        web_page.read_runtime()


def test_graphs_share_their_weights_and_run(written, tmp_path):
    classifier, folder, _ = written
    model, cost = delivered(folder, "model"), delivered(folder, "cost")
    (tmp_path / "weights").write_bytes(model["weights"])
    values = sum(parameter.numel() for parameter in classifier.model.parameters())
    assert len(model["weights"]) < 1.5 * 4 * values + 64 * 100, "each constant once"
    images = torch.randn(1, 3, 32, 32)
    large = torch.randn(1, 3, 64, 64)
    other, kind = twin(classifier.model)
    assert kind == "softmax"
    with torch.no_grad():
        expected = [classifier.model(images), classifier.model(large), other(large)]
    graphs = [(model["model"], images), (cost["cost-inline"], large), (cost["cost-softmax"], large)]
    for (graph, inputs), scores in zip(graphs, expected, strict=True):
        (tmp_path / "graph.onnx").write_bytes(graph)
        torch.testing.assert_close(onnx_runner(tmp_path / "graph.onnx")(inputs), scores, rtol=1e-4, atol=1e-4)


def expected_weights(classifier, image, token, layer=0):
    """Weights of a token for all tokens, means over heads, by the definition."""
    captured = []
    block = classifier.model.blocks[layer]
    hook = block.attn.register_forward_pre_hook(lambda module, inputs: captured.append(module.project(inputs[0])))
    with torch.no_grad():
        classifier.model(image[None])
    hook.remove()
    (call,) = captured
    weights = attention_weights(call.q, call.k, scale=call.scale, feature_map=call.feature_map)
    return weights[0, :, token].mean(0)


def test_features_give_the_weights_of_the_definition():
    classifier = classifier_of(attention_options={"feature_map": "leaky_relu"})
    image = torch.randn(3, 32, 32)
    names = [layer.name for layer in global_layers(classifier.model, (32, 32))]
    with torch.no_grad():
        before = classifier.model(image[None])
        scores, queries, keys = WithFeatures(classifier.model, names)(image[None])
        assert torch.equal(before, classifier.model(image[None])), "the model is left as it was"
    # Observed, the model runs its last MLP for all tokens, not for the class token alone.
    torch.testing.assert_close(scores, before, rtol=1e-6, atol=1e-6)
    products = torch.einsum("hd,nhd->hn", queries[0, 5].double(), keys[0].double())
    weights = ((products - products.mean(1, keepdim=True) + 1) / products.shape[1]).mean(0)
    torch.testing.assert_close(weights, expected_weights(classifier, image, 5).double(), rtol=1e-4, atol=1e-6)


def test_slider_sizes():
    assert web_page.slider_sizes((224, 224)) == [(224, 224), (448, 448), (896, 896), (1024, 1024)]
    assert web_page.slider_sizes((32, 32))[-1] == (1024, 1024)
    assert web_page.slider_sizes((1200, 600)) == [(1200, 600)]


def test_twins():
    model = create_model("softmax_deit_tiny", **ARGUMENTS).eval()
    other, kind = twin(model)
    assert kind == "inline"
    assert torch.equal(other.pos_embed, model.pos_embed)
    assert twin(torch.nn.Linear(1, 1)) is None


def test_equal_constants_are_stored_once(tmp_path):
    onnx = pytest.importorskip("onnx")
    values = np.arange(1024, dtype=np.float32)
    paths = []
    for name in ("a", "b"):
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node("Add", ["x", "c"], ["y"])],
            name,
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1024])],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1024])],
            [onnx.numpy_helper.from_array(values, "c")],
        )
        paths.append(tmp_path / f"{name}.onnx")
        onnx.save(onnx.helper.make_model(graph), paths[-1])
    graphs, weights = share_weights(paths)
    assert weights == values.tobytes()
    assert all(len(graph) < 400 for graph in graphs)


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def failing(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(web_page, "trace", failing)
    classifier = classifier_of()
    with pytest.raises(OSError, match="No space left"):
        web_page.export_page(classifier, tmp_path / "page", torch.zeros(1, 3, 32, 32), with_speed=False)
    assert list(tmp_path.iterdir()) == []


def test_models_that_the_page_cannot_prepare_pictures_for(tmp_path):
    classifier = classifier_of(in_chans=4)
    with pytest.raises(ValueError, match="3 channels"):
        web_page.export_page(classifier, tmp_path / "page", torch.zeros(1, 4, 32, 32))
    assert list(tmp_path.iterdir()) == []


def open_page(browser, folder, **options):
    """Return a page that is ready, with lists of its complaints and of the addresses that it asked for."""
    context = browser.new_context(**options)
    page = context.new_page()
    complaints, addresses = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: addresses.append(request.url))
    context.route(re.compile("^https?:"), lambda route: route.abort())
    page.goto((folder / "index.html").as_uri())
    page.locator("#classes[data-scores]").wait_for(timeout=60_000)
    return page, complaints, addresses


def scores_of(page):
    return torch.tensor(json.loads(page.get_attribute("#classes", "data-scores")))


def choose(page, path):
    page.evaluate("() => { document.getElementById('classes').removeAttribute('data-scores') }")
    page.set_input_files("#file", path)
    page.locator("#classes[data-scores]").wait_for()


@pytest.mark.xdist_group("browser")
def test_in_a_browser(written, browser, tmp_path):
    classifier, folder, _ = written
    page, complaints, addresses = open_page(browser, folder, viewport={"width": 1280, "height": 900})

    # Resized by 8/7 and cropped, without a resize on the way, and as large photographs are.
    cases = {"own.png": picture(36, 36, 2), "photo.png": picture(700, 500, 3), "wide.png": picture(20, 400, 4)}
    for name, image in cases.items():
        image.save(tmp_path / name)
        choose(page, tmp_path / name)
        prepared = classifier.prepare_image(image)
        with torch.no_grad():
            expected = classifier.model(prepared[None])[0]
        got = scores_of(page)
        assert (got - expected).abs().max() <= (1e-3 if name == "own.png" else 1e-2) * expected.abs().max(), name
        best = int(expected.argmax())
        shown = page.locator("#classes li .name").first.text_content()
        assert shown == web_page.printable(NAMES[best])
        assert f"{100 * expected.softmax(0)[best]:.1f} %" == page.locator("#classes li .percent").first.text_content()
    assert page.locator("#classes li").count() == len(NAMES)
    assert "ms for this picture" in page.text_content("#status")

    choose(page, tmp_path / "own.png")
    box = page.locator("#picture").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 3.5 / 8, box["y"] + box["height"] * 2.5 / 8)
    prepared = classifier.prepare_image(cases["own.png"])

    def weights():
        return torch.tensor(json.loads(page.get_attribute("#picture", "data-weights")), dtype=torch.float64)

    expected = expected_weights(classifier, prepared, 1 + 2 * 8 + 3)
    assert (weights() - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert "Row 3, column 4 of 8×8" in page.text_content("#token")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    expected = expected_weights(classifier, prepared, 1 + 3 * 8 + 2)
    assert (weights() - expected).abs().max() <= 1e-4 * expected.abs().max()
    page.keyboard.press("Escape")
    assert page.get_attribute("#picture", "data-weights") is None

    times = measured(page, 1)
    assert all(isinstance(times[key], int | float) for key in ("inline 1", "softmax 1"))
    times = measured(page, 2)
    assert isinstance(times["inline 2"], int | float)
    assert times["softmax 2"] == "softmax needs 0.0 GiB for its weights here"
    assert page.locator("#chart .k-inline .marker").count() == 2
    assert page.locator("#chart .k-softmax .marker").count() == 1
    assert page.locator("#times tr").count() == 2

    (tmp_path / "broken.png").write_bytes(b"no picture")
    page.set_input_files("#file", tmp_path / "broken.png")
    page.locator("#status.bad").wait_for()
    assert "no picture that the browser can read" in page.text_content("#status")
    assert complaints == []
    assert [address for address in addresses if not address.startswith(("file:", "blob:", "data:"))] == []
    page.context.close()


def measured(page, stop):
    """Move the slider by the keyboard and return all times."""
    page.focus("#size")
    while int(page.input_value("#size")) < stop:
        page.keyboard.press("ArrowRight")
    page.locator(f"#times tr:nth-child({stop}) td:nth-child(4)", has_not_text="…").wait_for(timeout=60_000)
    page.locator("#cancel[disabled]").wait_for()
    return json.loads(page.get_attribute("#cost", "data-times"))


@pytest.mark.xdist_group("browser")
def test_on_a_phone_in_the_dark_by_keyboard(written, browser):
    _, folder, _ = written
    page, complaints, _ = open_page(
        browser, folder, viewport={"width": 390, "height": 844}, color_scheme="dark", has_touch=True
    )
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert background == "rgb({}, {}, {})".format(*(int(DARK["paper"][i : i + 2], 16) for i in (1, 3, 5)))
    for control in ("#choose", "#measure", "#picture", "#size"):
        assert page.locator(control).bounding_box()["height"] >= 36, "large enough for a finger"
    assert all(row.bounding_box()["height"] < 120 for row in page.locator("#classes li").all()), "long names are cut"
    reached = []
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("() => document.activeElement.id || document.activeElement.getAttribute('aria-label')")
        )
    for control in ("picture", "choose", "Example 2: photo", "layer", "head", "size", "measure"):
        assert control in reached
    before = page.text_content("#token")
    page.focus("#picture")
    page.keyboard.press("ArrowRight")
    assert page.text_content("#token") != before
    page.get_by_role("button", name="Example 2: photo").press("Enter")
    page.locator("#examples button:nth-child(2)[aria-pressed=true]").wait_for()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert complaints == []
    page.context.close()


@pytest.mark.xdist_group("browser")
def test_a_measurement_is_canceled(written, browser):
    page, complaints, _ = open_page(browser, written[1])
    page.click("#measure")
    page.click("#cancel")
    assert page.text_content("#cost-status") == "Canceled."
    assert page.is_enabled("#measure")
    page.click("#measure")
    page.locator("#times tr td:nth-child(4)", has_text="ms").wait_for(timeout=60_000)
    assert complaints == []
    page.context.close()


@pytest.mark.xdist_group("browser")
def test_a_model_without_inline_attention_shows_classes_only(browser, tmp_path):
    classifier = classifier_of("softmax_deit_tiny")
    folder = tmp_path / "page"
    examples = [("photo", picture(40, 40))]
    images = classifier.prepare_image(examples[0][1])[None]
    web_page.export_page(classifier, folder, images, None, examples, with_speed=False)
    page, complaints, _ = open_page(browser, folder)
    assert page.is_hidden("#weights-panel")
    assert "no InLine attention over the whole picture" in page.text_content("#weights-note")
    assert page.is_hidden("#cost-panel")
    assert "--no-speed" in page.text_content("#cost-note")
    assert (scores_of(page) - classifier.model(images)[0]).abs().max() < 1e-2
    assert complaints == []
    page.context.close()
