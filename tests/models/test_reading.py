"""Reading files of weights: every layout in the wild, hostile and damaged ones."""

import argparse
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
from safetensors.torch import save_file
from torch import nn

from inline_attention.models.checkpoints import load_checkpoint, save_weights
from inline_attention.models.reading import CheckpointError, UnsafeCheckpointError, read_checkpoint
from models.small_model import Classifier, assert_same, snapshot


class Hostile:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


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
    with pytest.raises(CheckpointError, match=r"no averaged \(EMA\) weights.*model_ema: it has model; omit use_ema"):
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
    before = set(torch.serialization.get_safe_globals())
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
    assert set(torch.serialization.get_safe_globals()) == before


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


# Damaged files and files that are not checkpoints


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
        (b"these are not weights\n" * 9, "truncated, damaged or not a checkpoint"),
        (b"ceci\nn'est pas\nun modele\n", "truncated, damaged or not a checkpoint"),
        (bytes(range(256)) * 8, "truncated, damaged or not a checkpoint"),
        (b"\x00" * 100, "truncated, damaged or not a checkpoint"),
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
        ([torch.ones(1)], "contains a list, expected a dict"),
        ({}, "contains no weights.*an empty dict"),
        ({"epoch": 3, "net": {"w": 1}}, "contains no weights.*got the entries epoch, net"),
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
