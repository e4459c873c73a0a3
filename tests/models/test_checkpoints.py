"""Files of weights: every layout in the wild, hostile and damaged ones, and models they do not fit."""

import argparse
import json
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import types
import zipfile
from contextlib import suppress

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from inline_attention.models import checkpoints
from inline_attention.models.checkpoints import (
    CheckpointError,
    CheckpointMismatchError,
    UnsafeCheckpointError,
    convert_checkpoint,
    load_checkpoint,
    read_checkpoint,
    save_weights,
)


class Classifier(nn.Module):
    """Two layers, a buffer and a head: the least that has everything a checkpoint can get wrong."""

    def __init__(self, num_classes: int = 10, dim: int = 4):
        super().__init__()
        self.embed = nn.Linear(3, dim)
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("steps", torch.tensor(7))
        self.head = nn.Linear(dim, num_classes) if num_classes else nn.Identity()


class Translating(Classifier):
    """Knows the names of another implementation, as the model families do."""

    def convert_state_dict(self, state_dict):
        renamed = {name.replace("patch_embed.", "embed."): value for name, value in state_dict.items()}
        return {name: value for name, value in renamed.items() if not name.endswith("attn_mask")}


class Hostile:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def assert_same(first, second):
    """Equal names, dtypes, shapes and bits."""
    assert set(first) == set(second)
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert value.shape == second[name].shape, name
        left, right = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (value, second[name]))
        assert torch.equal(left, right), name


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture
def state():
    return Classifier().state_dict()


@pytest.fixture
def weights_file(tmp_path, state):
    save_weights(state, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


@pytest.fixture
def yacs_node(monkeypatch):
    """A class that pickles as yacs' CfgNode does: a dict whose switches live in its `__dict__`."""

    class CfgNode(dict):
        def __init__(self, entries):
            super().__init__({k: CfgNode(v) if isinstance(v, dict) else v for k, v in entries.items()})
            self.__dict__.update(
                {
                    "__immutable__": True,
                    "__deprecated_keys__": {"OLD.KEY"},
                    "__renamed_keys__": {"A.B": ("C.D", "note")},
                    "__new_allowed__": False,
                }
            )

        def __getattr__(self, name):
            if name in self:
                return self[name]
            raise AttributeError(name)

        def __setattr__(self, name, value):
            raise AttributeError(f"frozen: {name}")

    CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"
    package, module = types.ModuleType("yacs"), types.ModuleType("yacs.config")
    module.CfgNode = CfgNode
    monkeypatch.setitem(sys.modules, "yacs", package)
    monkeypatch.setitem(sys.modules, "yacs.config", module)
    return CfgNode


# Layouts


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", ["weights.pth", "weights.pt", "weights.bin", "model_best.pth.tar"])
def test_bare_state_dict(tmp_path, state, name, legacy):
    torch.save(state, tmp_path / name, _use_new_zipfile_serialization=not legacy)
    assert_same(read_checkpoint(tmp_path / name), state)
    assert_same(read_checkpoint(str(tmp_path / name), use_ema=False), state)


def test_foreign_safetensors(tmp_path, state):
    save_file(state, tmp_path / "hub.safetensors")
    assert_same(read_checkpoint(tmp_path / "hub.safetensors"), state)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_training_checkpoint_of_the_authors_needs_no_yacs(tmp_path, monkeypatch, yacs_node, legacy):
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.norm(model.embed(torch.randn(2, 3)))).sum().backward()
    optimizer.step()
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": {"base_values": [5e-4], "metric": None, "noise_range_t": None},
        "max_accuracy": numpy.float64(82.4),
        "epoch": numpy.int64(299),
        "config": yacs_node({"DATA": {"SIZE": (224, 224), "AUG": {"M": 0.8}}, "BASE": [""], "TAG": None}),
    }
    torch.save(content, tmp_path / "authors.pth", _use_new_zipfile_serialization=not legacy)
    for module in ("yacs", "yacs.config"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of it would fail
    report = load_checkpoint(Classifier(), tmp_path / "authors.pth")
    assert report.origin == "model"
    assert_same(read_checkpoint(tmp_path / "authors.pth"), model.state_dict())


def test_training_checkpoint_of_timm(tmp_path, state):
    averaged = {name: value + 1 for name, value in state.items()}
    content = {
        "state_dict": state,
        "state_dict_ema": averaged,
        "args": argparse.Namespace(lr=1e-3, output=pathlib.PurePosixPath("runs"), data=tmp_path),
        "metric": numpy.float32(81.5),
        "history": numpy.arange(3.0),
        "version": torch.__version__,
    }
    path = tmp_path / "timm.pth.tar"
    torch.save(content, path)
    assert_same(read_checkpoint(path), averaged)
    assert_same(read_checkpoint(path, use_ema=True), averaged)
    assert_same(read_checkpoint(path, use_ema=False), state)
    assert "from 'state_dict_ema'" in str(load_checkpoint(Classifier(), path))


def test_the_set_of_weights_asked_for_must_be_there(tmp_path, state, weights_file):
    path = tmp_path / "checkpoint.pth"
    torch.save({"model": state, "model_ema": None}, path)
    assert_same(read_checkpoint(path), state)
    with pytest.raises(CheckpointError, match=r"no averaged \(EMA\) weights.*model_ema: it has model; leave use_ema"):
        read_checkpoint(path, use_ema=True)
    torch.save({"model_ema": state, "model": {"type": "a configuration, not weights"}}, path)
    assert_same(read_checkpoint(path), state)
    with pytest.raises(CheckpointError, match=r"no raw weights.*it has model_ema"):
        read_checkpoint(path, use_ema=False)
    with pytest.raises(CheckpointError, match="it has one unnamed set"):
        read_checkpoint(weights_file, use_ema=True)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_stripped(tmp_path, state, prefix):
    torch.save({prefix + name: value for name, value in state.items()}, tmp_path / "wrapped.pth")
    assert_same(read_checkpoint(tmp_path / "wrapped.pth"), state)


def test_two_tensors_of_one_name_are_refused(tmp_path):
    torch.save({"module.a": torch.ones(1), "a": torch.zeros(1)}, tmp_path / "twice.pth")
    with pytest.raises(CheckpointError, match="two tensors for 'a'"):
        read_checkpoint(tmp_path / "twice.pth")


def test_entries_that_are_not_tensors(tmp_path, state):
    path = tmp_path / "mixed.pth"
    torch.save({**state, "epoch": 3, "loss": 0.5, "done": True}, path)
    assert_same(read_checkpoint(path), state)
    odd = {"note": "text", "array": numpy.ones(2), "sparse": torch.eye(2).to_sparse(), 5: torch.ones(1)}
    torch.save({**state, **odd}, path)
    with pytest.raises(CheckpointError, match=r"note \(str\), array \(numpy.*\), sparse \(torch.sparse_coo.*, 5 \("):
        read_checkpoint(path)


def test_what_is_read_does_not_change_with_the_file(tmp_path, state, weights_file):
    archive = tmp_path / "weights.pth"
    torch.save(state, archive)
    read = read_checkpoint(archive), read_checkpoint(weights_file)
    for path in (archive, weights_file):
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    for weights in read:
        assert_same(weights, state)


# Hostile files


def hostile_calls(marker):
    return {
        "posix.system": (os.system, f"touch {marker}"),
        "builtins.eval": (eval, f"open({str(marker)!r}, 'w')"),
        "builtins.exec": (exec, f"open({str(marker)!r}, 'w')"),
        "builtins.getattr": (getattr, "", "join"),
        "subprocess.Popen": (subprocess.Popen, ["touch", str(marker)]),
        "torch.hub.load": (torch.hub.load, str(marker)),
        "io.open": (open, str(marker), "w"),
    }


@pytest.mark.parametrize("form", ["zip", "legacy", "nested", "in a tensor's place", "plain pickle"])
@pytest.mark.parametrize("name", list(hostile_calls("")))
def test_nothing_in_a_hostile_file_runs(tmp_path, state, name, form):
    marker, path = tmp_path / "marker", tmp_path / "weights.pth"
    evil = Hostile(*hostile_calls(marker)[name])
    if form == "plain pickle":
        path.write_bytes(pickle.dumps(evil, protocol=2))
    elif form == "nested":
        torch.save({"model": state, "config": {"DATA": [{"PATH": (evil,)}]}}, path)
    elif form == "in a tensor's place":
        torch.save({**state, "extra": evil}, path)
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=form == "zip")
    before = torch.serialization.get_safe_globals()
    model = Classifier()
    untouched = snapshot(model)
    with pytest.raises(UnsafeCheckpointError) as caught:
        load_checkpoint(model, path)
    message = str(caught.value)
    assert name in message
    assert str(path) in message
    assert "nothing in it was run" in message
    assert ".safetensors" in message
    assert "weights_only" not in message, "torch's advice to switch the protection off must not get through"
    assert caught.value.__suppress_context__
    assert not marker.exists()
    assert_same(snapshot(model), untouched)
    assert torch.serialization.get_safe_globals() == before


@pytest.mark.parametrize("protocol", [0, 3, 4, 5])
@pytest.mark.parametrize("in_archive", [True, False], ids=["zip", "plain"])
def test_hostile_names_are_found_in_other_pickle_protocols(tmp_path, state, protocol, in_archive):
    marker, path = tmp_path / "marker", tmp_path / "weights.pth"
    evil = {"model": 1, "config": [Hostile(os.system, f"touch {marker}")] * 2}
    if in_archive and protocol:
        torch.save(evil, path, pickle_protocol=protocol)
    else:
        path.write_bytes(pickle.dumps(evil, protocol=protocol))
    with pytest.raises(UnsafeCheckpointError, match=r"posix\.system"):
        read_checkpoint(path)
    assert not marker.exists()


def test_a_pickled_model_is_refused_by_name(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pth")
    with pytest.raises(UnsafeCheckpointError, match=r"torch\.nn\.modules\.linear\.Linear.*state_dict"):
        read_checkpoint(tmp_path / "whole.pth")


def test_what_the_process_trusts_elsewhere_is_not_trusted_here(tmp_path, state):
    marker, path = tmp_path / "marker", tmp_path / "weights.pth"
    torch.save({"model": state, "evil": Hostile(eval, f"open({str(marker)!r}, 'w')")}, path)
    with torch.serialization.safe_globals([eval]):
        with pytest.raises(UnsafeCheckpointError, match="eval"):
            read_checkpoint(path)
        assert eval in torch.serialization.get_safe_globals()
    assert not marker.exists()


def test_threads_do_not_disturb_each_other(tmp_path, state):
    path, failures = tmp_path / "weights.pth", []
    torch.save({"model": state, "args": argparse.Namespace(lr=1.0)}, path)

    def read_often():
        try:
            for _ in range(20):
                read_checkpoint(path)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=read_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Damaged files and what is no checkpoint


def write_zip_checkpoint(path, state):
    torch.save({"model": state}, path)


def write_legacy_checkpoint(path, state):
    torch.save({"model": state}, path, _use_new_zipfile_serialization=False)


WRITERS = {
    "zip.pth": write_zip_checkpoint,
    "legacy.pth": write_legacy_checkpoint,
    "ours.safetensors": lambda path, state: save_weights(state, path),
}


@pytest.mark.parametrize("kept", [0.02, 0.3, 0.6, 0.95, 0.999])
@pytest.mark.parametrize("name", list(WRITERS))
def test_truncated_file(tmp_path, state, name, kept):
    path = tmp_path / name
    WRITERS[name](path, state)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(CheckpointError, match=f"{name} .*(truncated|damaged).*fetch or copy it again"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["zip.pth", "ours.safetensors"])
def test_flipped_bits_never_change_a_weight(tmp_path, state, name):
    path = tmp_path / name
    WRITERS[name](path, state)
    intact, refused = path.read_bytes(), 0
    positions = range(0, len(intact), max(1, len(intact) // 150))
    for position in positions:
        damaged = bytearray(intact)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            assert_same(read_checkpoint(path), state)  # padding, time stamps: nothing that counts
        except CheckpointError:
            refused += 1
    assert refused > len(positions) // 5


@pytest.mark.parametrize("name", ["zip.pth", "ours.safetensors"])
def test_flipped_bit_in_a_weight_is_named(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path, {"weight": torch.full((64,), 3.0)})
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((64,), 3.0).numpy().tobytes()) + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is damaged.*checksum"):
        read_checkpoint(path)


def test_garbage_in_a_legacy_file_is_refused_or_read(tmp_path, state):
    path = tmp_path / "legacy.pth"
    write_legacy_checkpoint(path, state)
    intact = path.read_bytes()
    for position in range(0, len(intact), max(1, len(intact) // 100)):
        path.write_bytes(intact[:position] + b"\xff" * 8 + intact[position + 8 :])
        with suppress(CheckpointError):  # this format has no checksums; any other error fails the test
            read_checkpoint(path)


def test_file_without_checksums_is_read(tmp_path, state):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "quick.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(read_checkpoint(tmp_path / "quick.pth"), state)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"these are not weights\n" * 9, "truncated, damaged or no checkpoint"),
        (b"ceci\nn'est pas\nun modele\n", "truncated, damaged or no checkpoint"),
        (bytes(range(256)) * 8, "truncated, damaged or no checkpoint"),
        (b"\x00" * 100, "truncated, damaged or no checkpoint"),
        (b"\n<!DOCTYPE html><html>Google Drive</html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
    ids=["empty", "text", "text like a pickle", "bytes", "zeros", "web page", "LFS pointer"],
)
def test_what_is_no_checkpoint(tmp_path, suffix, content, message):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"file{suffix} .*{message}"):
        read_checkpoint(path)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent\.pth cannot be opened: No such file"):
        read_checkpoint(tmp_path / "absent.pth")
    with pytest.raises(CheckpointError, match=r"is a folder.*name the"):
        read_checkpoint(tmp_path)


def test_content_that_is_no_state_dict(tmp_path):
    path = tmp_path / "content.pth"
    for content, message in (
        ([torch.ones(1)], "holds a list, expected a dict"),
        ({}, "holds no weights.*an empty dict"),
        ({"epoch": 3, "net": {"w": 1}}, "holds no weights.*got the entries epoch, net"),
    ):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(path)


def test_compressed_archive(tmp_path, state):
    torch.save(state, tmp_path / "inner.pth")
    with zipfile.ZipFile(tmp_path / "outer.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "inner.pth")
    with pytest.raises(CheckpointError, match=r"compressed archive.*unpack it first"):
        read_checkpoint(tmp_path / "outer.pth")


# Loading


def test_load_gives_the_model_the_file(weights_file, state):
    model = Classifier()
    report = load_checkpoint(model, weights_file)
    assert_same(model.state_dict(), state)
    assert set(report.loaded) == set(state)
    assert (report.missing, report.unexpected, report.reinitialized, report.cast, report.nonfinite) == ((),) * 5
    assert str(report) == f"{weights_file}: 7 tensors"


def test_mismatch_lists_everything_and_loads_nothing(tmp_path, state):
    del state["norm.weight"]
    state["extra"] = torch.ones(1)
    state["embed.weight"] = torch.ones(4, 5)
    state["norm.bias"] = torch.ones(4, dtype=torch.int8)
    torch.save(state, tmp_path / "other.pth")
    model = Classifier()
    untouched = snapshot(model)
    with pytest.raises(CheckpointMismatchError) as caught:
        load_checkpoint(model, tmp_path / "other.pth")
    error = caught.value
    assert error.missing == ("norm.weight",)
    assert error.unexpected == ("extra",)
    assert error.mismatched == (("embed.weight", (4, 5), (4, 3)), ("norm.bias", (4,), (4,)))
    for part in (
        "other.pth does not fit Classifier",
        "1 missing in the file: norm.weight",
        "1 unknown to the model: extra",
        "embed.weight (file (4, 5) float32, model (4, 3) float32)",
        "norm.bias (file (4,) int8, model (4,) float32)",
        "create the model that the file was made for",
    ):
        assert part in str(error)
    assert "head" not in str(error)
    assert_same(snapshot(model), untouched)
    assert isinstance(pickle.loads(pickle.dumps(error)), CheckpointMismatchError)


def test_long_lists_are_cut(tmp_path, state):
    torch.save({**state, **{f"extra.{i}": torch.ones(1) for i in range(30)}}, tmp_path / "long.pth")
    with pytest.raises(CheckpointMismatchError, match=r"30 unknown .*extra\.11 and 18 more") as caught:
        load_checkpoint(Classifier(), tmp_path / "long.pth")
    assert len(caught.value.unexpected) == 30


def test_loose_loading_reports_what_differs_but_shapes_count(tmp_path, state):
    path = tmp_path / "part.pth"
    del state["norm.weight"]
    state["extra"] = torch.ones(1)
    torch.save(state, path)
    model = Classifier()
    gain = model.norm.weight.clone()
    report = load_checkpoint(model, path, strict=False)
    assert (report.missing, report.unexpected) == (("norm.weight",), ("extra",))
    assert "1 missing (norm.weight); 1 unexpected (extra)" in str(report)
    assert torch.equal(model.norm.weight, gain)
    assert torch.equal(model.embed.weight, state["embed.weight"])
    with pytest.raises(CheckpointMismatchError, match="of another shape"):
        load_checkpoint(Classifier(dim=5), path, strict=False)
    torch.save({"nothing.in.common": torch.ones(1)}, path)
    with pytest.raises(CheckpointMismatchError):
        load_checkpoint(model, path, strict=False)


def test_head_of_another_size(tmp_path):
    path = tmp_path / "imagenet.pth"
    torch.save(Classifier(1000).state_dict(), path)
    model = Classifier(10)
    untouched = snapshot(model)
    expected = (
        r"the file has a head for 1000 classes, the model one for 10: create the model with num_classes=1000 "
        r"\(--num-classes on the command line\), or pass reinitialize_head=True"
    )
    for strict in (True, False):
        with pytest.raises(CheckpointMismatchError, match=expected) as caught:
            load_checkpoint(model, path, strict=strict)
    assert "create the model that" not in str(caught.value)
    assert caught.value.mismatched == (("head.weight", (1000, 4), (10, 4)), ("head.bias", (1000,), (10,)))
    assert_same(snapshot(model), untouched)

    report = load_checkpoint(model, path, reinitialize_head=True)
    assert report.reinitialized == ("head.weight", "head.bias")
    assert "head left as initialised (head.weight, head.bias)" in str(report)
    assert torch.equal(model.head.weight, untouched["head.weight"])
    assert not torch.equal(model.embed.weight, untouched["embed.weight"])


def test_head_missing_on_either_side(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(Classifier(1000).state_dict(), path)
    with pytest.raises(
        CheckpointMismatchError, match="1000 classes, the model none: create the model with num_classes"
    ):
        load_checkpoint(Classifier(0), path)
    assert load_checkpoint(Classifier(0), path, reinitialize_head=True).reinitialized == ()
    torch.save(Classifier(0).state_dict(), path)
    with pytest.raises(CheckpointMismatchError, match="no head, the model one for 10 classes: pass reinit"):
        load_checkpoint(Classifier(10), path)
    assert load_checkpoint(Classifier(10), path, reinitialize_head=True).missing == ()


def test_reinitialized_head_is_kept_even_if_it_would_fit(weights_file):
    model = Classifier()
    weight = model.head.weight.clone()
    load_checkpoint(model, weights_file, reinitialize_head=True)
    assert torch.equal(model.head.weight, weight)


@pytest.mark.parametrize("classifier", ["fc.out", ("fc.out", "fc.distilled")])
def test_name_of_the_head_comes_from_the_model(tmp_path, classifier):
    def create(num_classes):
        model = Classifier(0)
        model.fc = nn.ModuleDict({"out": nn.Linear(4, num_classes), "distilled": nn.Linear(4, num_classes)})
        model.pretrained_cfg = {"classifier": classifier}
        return model

    torch.save(create(1000).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointMismatchError, match="a head for 1000 classes, the model one for 10:"):
        load_checkpoint(create(10), tmp_path / "weights.pth")
    if isinstance(classifier, tuple):
        assert len(load_checkpoint(create(10), tmp_path / "weights.pth", reinitialize_head=True).reinitialized) == 4


def test_the_model_translates_names(tmp_path, state):
    foreign = {name.replace("embed.", "patch_embed."): value for name, value in state.items()}
    torch.save({"model": {**foreign, "layers.0.attn_mask": torch.ones(2)}}, tmp_path / "authors.pth")
    model = Translating()
    load_checkpoint(model, tmp_path / "authors.pth")
    assert_same(model.state_dict(), state)
    with pytest.raises(CheckpointMismatchError, match=r"patch_embed\.weight"):
        load_checkpoint(Classifier(), tmp_path / "authors.pth")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_cast_and_reported(tmp_path, state, dtype):
    weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    torch.save(weights, tmp_path / "half.pth")
    model = Classifier()
    report = load_checkpoint(model, tmp_path / "half.pth")
    assert set(report.cast) == set(state) - {"steps"}
    assert "6 cast to the model's dtype" in str(report)
    assert model.embed.weight.dtype == torch.float32
    assert torch.equal(model.embed.weight, weights["embed.weight"].float())


def test_values_that_are_not_finite_are_named_and_kept(tmp_path, state):
    state["norm.bias"][0] = float("nan")
    state["embed.weight"][0, 0] = 1e30
    torch.save(state, tmp_path / "weights.pth")
    model = Classifier()
    with pytest.warns(UserWarning, match=r"weights\.pth gives NaN or infinite values in norm\.bias; they"):
        report = load_checkpoint(model, tmp_path / "weights.pth")
    assert report.nonfinite == ("norm.bias",)
    assert model.norm.bias[0].isnan()
    with pytest.warns(UserWarning, match=r"in embed\.weight, norm\.bias"):  # 1e30 overflows in half precision
        load_checkpoint(Classifier().half(), tmp_path / "weights.pth")
    with pytest.warns(UserWarning, match=r"in norm\.bias"):
        convert_checkpoint(tmp_path / "weights.pth", tmp_path / "weights.safetensors")


def test_a_model_without_values_is_refused(weights_file):
    with torch.device("meta"):
        model = Classifier()
    with pytest.raises(CheckpointError, match=r"meta device.*to_empty"):
        load_checkpoint(model, weights_file)


# Saving and converting


def awkward_tensors():
    shared = torch.randn(4, 6)
    return {
        "float": torch.randn(3, 5),
        "bfloat16": torch.randn(3, 5).bfloat16(),
        "half": torch.randn(3, 5).half(),
        "double": torch.randn(3).double(),
        "special": torch.tensor([0.0, -0.0, 1e-45, 3e38]),
        "integers": torch.arange(12).reshape(3, 4),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "strided": torch.randn(8, 8)[::2, 1::3],
        "expanded": torch.randn(4, 1).expand(4, 3),
        "shared": shared,
        "shared_part": shared[1:3],
        "shared_again": shared,
        "parameter": nn.Parameter(torch.randn(2)),
    }


@pytest.mark.parametrize("source", ["weights.pth", "weights.safetensors"])
def test_round_trip_is_exact_to_the_bit(tmp_path, source):
    tensors = awkward_tensors()
    if source.endswith(".pth"):
        torch.save({"model": tensors}, tmp_path / source)
    else:
        save_weights(tensors, tmp_path / source)
    report = convert_checkpoint(tmp_path / source, tmp_path / "converted.safetensors")
    assert set(report.loaded) == set(tensors)
    read = read_checkpoint(tmp_path / "converted.safetensors")
    assert_same(read, tensors)
    assert all(value.is_contiguous() for value in read.values())
    assert_same(load_file(tmp_path / "converted.safetensors"), tensors)
    convert_checkpoint(tmp_path / "converted.safetensors", tmp_path / "converted.safetensors")  # onto itself
    assert_same(read_checkpoint(tmp_path / "converted.safetensors"), tensors)


def test_metadata_say_format_source_and_checksum(tmp_path, state):
    torch.save(state, tmp_path / "weights.pth")
    convert_checkpoint(tmp_path / "weights.pth", tmp_path / "weights.safetensors")
    content = (tmp_path / "weights.safetensors").read_bytes()
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    assert metadata.pop("sha256")
    assert metadata == {"format": "pt", "source": "weights.pth"}


def test_save_a_model_compiled_or_not(tmp_path):
    model = Classifier()
    for module in (model, torch.compile(model)):
        save_weights(module, tmp_path / "model.safetensors")
        assert_same(read_checkpoint(tmp_path / "model.safetensors"), model.state_dict())


def test_convert_in_the_names_of_a_model(tmp_path, state):
    half = {name.replace("embed.", "patch_embed."): value.half() for name, value in state.items() if name != "steps"}
    torch.save({"model": {**half, "steps": state["steps"]}}, tmp_path / "authors.pth")
    with torch.device("meta"):
        model = Translating()
    convert_checkpoint(tmp_path / "authors.pth", tmp_path / "ours.safetensors", model=model)
    converted = read_checkpoint(tmp_path / "ours.safetensors")
    assert set(converted) == set(state)
    assert converted["embed.weight"].dtype == torch.float16, "conversion keeps the precision of the file"
    with pytest.raises(CheckpointMismatchError, match="create the model with num_classes=10"):
        convert_checkpoint(tmp_path / "authors.pth", tmp_path / "wrong.safetensors", model=Translating(5))
    assert not (tmp_path / "wrong.safetensors").exists()


def test_weights_are_saved_as_safetensors_only(tmp_path, state):
    with pytest.raises(CheckpointError, match=r"saved as \.safetensors, got .*x\.pth; try .*x\.safetensors"):
        save_weights(state, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"expected named dense tensors, got note \(str\)"):
        save_weights({**state, "note": "text"}, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_disk_full_leaves_the_old_file(tmp_path, weights_file, state):
    """A limit on the size of files stands for a disk without space: the write fails half-way, for real."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"weights\.safetensors could not be written .*unchanged.*has space"):
            save_weights({"large": torch.ones(1_000_000)}, weights_file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(read_checkpoint(weights_file), state)
    assert list(tmp_path.iterdir()) == [weights_file]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_failure_late_in_saving_leaves_the_old_file(tmp_path, monkeypatch, weights_file, state, function):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.os, function, fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_weights({"other": torch.ones(3)}, weights_file)
    assert_same(read_checkpoint(weights_file), state)
    assert list(tmp_path.iterdir()) == [weights_file]


def test_places_that_cannot_be_written(tmp_path, weights_file, state):
    (tmp_path / "folder.safetensors").mkdir()
    for path in (
        tmp_path / "absent" / "x.safetensors",
        weights_file / "x.safetensors",
        tmp_path / "folder.safetensors",
        pathlib.Path("/proc/x.safetensors"),
    ):
        with pytest.raises(CheckpointError, match=r"could not be written.*folder exists"):
            save_weights(state, path)
    assert len(list(tmp_path.iterdir())) == 2
