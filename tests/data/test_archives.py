"""Archives from strangers: CIFAR-10 and shards."""

import gc
import gzip
import os
import sys
import tarfile
import weakref

import pytest

import warm
from data.conftest import add_to_tar, jpeg
from inline_attention.data import cifar10
from inline_attention.data.datasets import open_dataset
from inline_attention.data.shards import open_tar
from inline_attention.data.sources import DataError
from inline_attention.support.text import printable


def header(name, size, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def packed(*parts):
    return b"".join(part.ljust(-(-len(part) // 512) * 512, b"\0") for part in parts) + bytes(1024)


def pax(**values):
    lines = b""
    for key, value in values.items():
        line = f" {key}={value}\n"
        length = len(line) + len(str(len(line) + 3))
        lines += f"{length}{line}".encode()
    return [header("pax", len(lines), tarfile.XHDTYPE), lines]


SHARDS = {
    "a negative size": packed(header("0.jpg", -512), b"x"),
    "a negative size in a pax header": packed(*pax(size=-1024), header("0.jpg", 1), b"x"),
    "a size beyond the end": packed(header("0.jpg", 2**60), b"x"),
    "a long name without end": packed(header("x", 2**40, tarfile.GNUTYPE_LONGNAME), b"x"),
    "a pax header without end": packed(header("x", 2**40, tarfile.XHDTYPE), b"x"),
    "pax headers without end": packed(*(pax(comment="x") * 5000)),
    "no number": packed(*pax(size="9" * 5000), header("0.jpg", 1), b"x"),
    "a sparse file": packed(header("0.jpg", 1, tarfile.GNUTYPE_SPARSE)),
    "links and devices": packed(*(header("0.jpg", 0, kind) for kind in (b"1", b"2", b"3", b"4", b"5", b"6", b"7"))),
    "names": packed(header("\x1b[31m/../0.jpg", 1), b"x", header("0.cls", 1), b"0"),
    "half a header": b"0.jpg" + bytes(300),
}


@pytest.mark.parametrize("kind", SHARDS)
def test_hostile_shards_give_a_sentence(tmp_path, kind):
    (tmp_path / "train.tar").write_bytes(SHARDS[kind])
    with pytest.raises(DataError) as caught:
        open_dataset("wds/train.tar", tmp_path)
    assert str(caught.value) == printable(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
def test_shards_that_are_no_files(tmp_path, kind):
    path = tmp_path / "train.tar"
    {"FIFO": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    with pytest.raises(DataError, match=r"does not exist|cannot be read|no file fits"):
        open_dataset("wds/train.tar", tmp_path)


@pytest.mark.parametrize("pattern", ["{0..999999999}.tar", "{0..9999}{0..9999}.tar", "{0..%s}.tar" % ("9" * 5000)])
def test_ranges_of_shards_are_bounded(tmp_path, pattern):
    with pytest.raises(DataError, match="names more than 1,000,000 archives"):
        open_dataset(f"wds/{pattern}", tmp_path)


def test_members_of_a_shard_name_no_files(tmp_path):
    (tmp_path / "secret.jpg").write_bytes(jpeg(0))
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        add_to_tar(archive, "0.cls", b"0")
        link = tarfile.TarInfo("0.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.jpg")
        archive.addfile(link)
    with pytest.raises(DataError, match="no image in 1 archives"):
        open_dataset("wds/train.tar", tmp_path)


LIMITED = """
import resource, sys
from inline_attention.data.datasets import open_dataset
from inline_attention.data.sources import DataError
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))
try: open_dataset("cifar10", sys.argv[1], "test")
except DataError as error: print(error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", ["test_batch.bin", "junk"])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, b"Z"])
def test_an_archive_that_unpacks_to_gigabytes_takes_little_memory(tmp_path, name, kind):
    zeros = gzip.compress(bytes(2**24), 9)
    start = gzip.compress(header(f"cifar-10-batches-bin/{name}", 2**33 - 1, kind))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(start + zeros * 512)
    result = warm.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True)
    assert "a member announces 8,589,934,591 bytes" in result.stdout, result.stdout + result.stderr
    assert result.stdout.count("\n") == 1


def test_headers_of_an_archive_are_not_kept(tmp_path):
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for number in range(100):
            add_to_tar(archive, str(number), b"")
    with open_tar(tmp_path / "cifar-10-binary.tar.gz", 2**20) as members:
        found = [weakref.ref(member) for member, _ in members]
    assert len(found) == 100
    gc.collect()
    assert sum(member() is not None for member in found) <= 1


def test_files_of_cifar10_are_bounded_regular_files(tmp_path):
    (tmp_path / "test_batch").symlink_to("/dev/zero")
    (tmp_path / "test_batch.bin").touch()
    os.truncate(tmp_path / "test_batch.bin", cifar10.MAX_FILE_BYTES + 1)
    with pytest.raises(DataError, match="cannot be read: it has more than"):
        open_dataset("cifar10", tmp_path, "test")
    (tmp_path / "test_batch").unlink()
    os.mkfifo(tmp_path / "test_batch")
    with pytest.raises(DataError, match="cannot be read: it has more than"):
        open_dataset("cifar10", tmp_path, "test")
