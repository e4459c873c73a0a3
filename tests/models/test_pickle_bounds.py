"""Pickles that are small on disk and deep or large in memory are refused before they are built."""

import io
import os
import pickle
import struct
import zipfile

import pytest
import torch

from inline_attention.models.checkpoints import CheckpointError, save_weights
from inline_attention.models.pickle_bounds import PickleBoundsError, check_pickle
from inline_attention.models.reading import read_checkpoint

LAUGHS = b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(90)) + b"h\x5a"
HOSTILE = {
    "deep tuple as a value": b"}X\x01\x00\x00\x00a)" + b"\x85" * 1_000_000 + b"s.",
    "deep tuple as a key": b"})" + b"\x85" * 1_000_000 + b"K\x01s.",
    "deep list": b"]" * 1000 + b"a" * 999 + b".",
    "deep dicts": b"}" + b"K\x01}" * 1000 + b"s" * 1000 + b".",
    "many marks": b"(" * 200_000 + b"t" * 200_000 + b".",
    "shared tuples as a key": b"}" + LAUGHS + b"K\x01s.",
    "shared tuples in a set": b"cbuiltins\nset\n](" + LAUGHS + b"e\x85R.",
}


def text(content):
    return b"X" + struct.pack("<I", len(content)) + content


GIGABYTES = b"\x8a\x06" + (9 * 2**30).to_bytes(6, "little")
REBUILD = b"ctorch._tensor\n_rebuild_from_type_v2\n"
FILLS_MEMORY = {
    "bytearray": b"cbuiltins\nbytearray\n" + GIGABYTES + b"\x85R",
    "bytearray of Python 2": b"c__builtin__\nbytearray\n" + GIGABYTES + b"\x85R",
    "bytearray by another call": REBUILD + b"(cbuiltins\nbytearray\nctorch\nTensor\n" + GIGABYTES + b"\x85NtR",
    "copies of a text": b"](c_codecs\nencode\nq\x00"
    + text(b"a" * 2**20)
    + b"q\x01\x85R"
    + b"h\x00h\x01\x85R" * 6000
    + b"e",
    "new tensor": b"ctorch\nByteTensor\nJ\x00\x00\x00\x10\x85R",
    "copy of a tensor": b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n(K\x01tR",
}


@pytest.mark.parametrize("name", FILLS_MEMORY)
def test_pickles_that_would_fill_the_memory(name, tmp_path):
    path = tmp_path / "weights.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}" + text(b"weight") + FILLS_MEMORY[name] + b"s.")
        archive.writestr("archive/version", "3")
    with pytest.raises(CheckpointError, match=r"far more memory|copies would take|do not need"):
        read_checkpoint(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("names", [["data.PKL"], ["data.pkl", "data.pkl"]])
def test_the_pickle_that_torch_reads_is_the_one_that_is_checked(names, tmp_path):
    contents = [b"\x80\x02" + HOSTILE["deep tuple as a key"], b"\x80\x02}."]
    path = tmp_path / "weights.pth"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in zip(names, contents, strict=False):
            archive.writestr(f"archive/{name}", content)
        archive.writestr("archive/version", "3")
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles(name, tmp_path):
    with pytest.raises(PickleBoundsError):
        check_pickle(io.BytesIO(b"\x80\x02" + HOSTILE[name]))
    path = tmp_path / "weights.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + HOSTILE[name])
        archive.writestr("archive/version", "3")
    with pytest.raises(CheckpointError, match=r"nested more than 100 deep|more than 1,000,000 parts"):
        read_checkpoint(path)


def test_honest_pickles_pass():
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    deep = [[[[{"a": (1, (2, {3, 4}), bytearray(b"bytes"), 5)}]]]]
    for content in (deep, optimizer.state_dict()["param_groups"], {"names": list(map(str, range(100_000)))}):
        for protocol in range(2, 6):
            check_pickle(io.BytesIO(pickle.dumps(content, protocol)))


@pytest.mark.parametrize("legacy", [False, True])
def test_strides_of_zero_do_not_ask_for_memory(tmp_path, legacy):
    path = tmp_path / "weights.pth"
    tensor = torch.zeros(1).as_strided((2**30, 2**6), (0, 0))  # 256 GiB of four bytes
    torch.save({"weight": tensor}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match="repeat their memory"):
        read_checkpoint(path)


def test_tied_and_expanded_weights_are_still_read(tmp_path):
    path = tmp_path / "weights.pth"
    weight = torch.randn(4, 1)
    torch.save({"a": weight, "b": weight, "c": weight.expand(4, 3)}, path)
    assert torch.equal(read_checkpoint(path)["c"], weight.expand(4, 3))


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_checkpoint(tmp_path / "weights.pth")


def test_equal_weights_give_equal_bytes(tmp_path):
    weights = {f"layer.{i}": torch.full((3,), float(i)) for i in range(20)}
    notes = {f"note {i}": f'"{i}" é\n\x01' for i in range(20)}
    save_weights(weights, tmp_path / "a.safetensors", metadata=notes)
    for attempt in range(5):
        again = tmp_path / f"b{attempt}.safetensors"
        save_weights(dict(reversed(weights.items())), again, metadata=dict(reversed(notes.items())))
        assert again.read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    assert torch.equal(read_checkpoint(again)["layer.3"], weights["layer.3"])
