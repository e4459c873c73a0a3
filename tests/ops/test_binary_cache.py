"""Compiled kernels are read only from files that nobody but the user could have written."""

import os
import stat
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from inline_attention.ops.backends.cuda import binary_cache

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no cache on disk without owners of files")

KEY, BINARY = "0123456789abcdef", b"a binary"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("INLINE_ATTENTION_CACHE", str(path))
    return path


@pytest.fixture
def stored(folder):
    """A file that is read, until a test spoils it."""
    binary_cache.write(KEY, BINARY)
    assert binary_cache.read(KEY) == BINARY
    (file,) = folder.iterdir()
    return file


def test_what_is_stored_is_private(folder, stored):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert stored.name == f"{KEY}.cubin"


def test_created_folders_are_private_under_any_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("INLINE_ATTENTION_CACHE", str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        binary_cache.write(KEY, BINARY)
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert binary_cache.read(KEY) == BINARY


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o770, 0o720, 0o1777])
def test_a_folder_that_is_not_private_is_not_used(folder, stored, mode):
    folder.chmod(mode)
    assert binary_cache.read(KEY) is None
    with pytest.warns(UserWarning, match=r"kernels are not kept: .*0700; type: chmod 700"):
        binary_cache.write("another", BINARY)
    assert list(folder.iterdir()) == [stored]


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_folder_around_it_that_others_can_write_is_not_used(tmp_path, stored, mode):
    assert stored.exists()
    tmp_path.chmod(mode)
    try:
        assert binary_cache.read(KEY) is None
        with pytest.warns(UserWarning, match="other users can write to a folder around"):
            binary_cache.write(KEY, BINARY)
        tmp_path.chmod(mode | stat.S_ISVTX)  # as /tmp: others cannot rename what is not theirs
        assert binary_cache.read(KEY) == BINARY
    finally:
        tmp_path.chmod(0o700)


def test_a_link_is_not_followed(folder, stored, tmp_path):
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert binary_cache.read(KEY) is None
    with pytest.warns(UserWarning, match="a link to one"):
        binary_cache.write(KEY, BINARY)
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    assert binary_cache.read(KEY) == BINARY
    target = stored.rename(folder / "target")
    stored.symlink_to(target)
    assert binary_cache.read(KEY) is None


def test_links_further_up_are_the_users(tmp_path, stored, monkeypatch):
    assert stored.exists()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("INLINE_ATTENTION_CACHE", str(tmp_path / "link" / "cache"))
    assert binary_cache.read(KEY) == BINARY


def test_what_belongs_to_another_user_is_not_used(folder, stored, monkeypatch):
    assert folder.exists()
    assert stored.exists()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert binary_cache.read(KEY) is None
    with pytest.warns(UserWarning, match="belongs to another user"):
        binary_cache.write(KEY, BINARY)


def spoiled(real, **changes):
    """`os.fstat` as if a file had other attributes; folders are as they are."""

    def fstat(descriptor):
        status = real(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return status
        fields = {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}
        return SimpleNamespace(**(fields | changes))

    return fstat


@pytest.mark.parametrize(
    "changes",
    [
        {"st_uid": 12345},
        {"st_nlink": 2},
        {"st_mode": stat.S_IFREG | 0o622},
        {"st_mode": stat.S_IFREG | 0o606},
        {"st_mode": stat.S_IFIFO | 0o600},
    ],
)
def test_a_file_that_another_user_could_have_written_is_not_read(stored, changes, monkeypatch):
    assert stored.exists()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", spoiled(os.fstat, **changes))
        found = binary_cache.read(KEY)
    assert found is None


def test_a_fifo_does_not_block(stored):
    stored.unlink()
    os.mkfifo(stored, 0o600)
    assert binary_cache.read(KEY) is None


def test_the_file_is_checked_by_descriptor_not_by_name(stored, monkeypatch):
    """A file that takes the place of the checked one between check and read is not read."""
    forged = stored.with_name("forged")
    forged.write_bytes(binary_cache._digest(KEY, b"forged") + b"forged")
    real = os.fstat

    def exchange(descriptor):
        status = real(descriptor)
        if stat.S_ISREG(status.st_mode) and forged.exists():
            os.replace(forged, stored)
        return status

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", exchange)
        found = binary_cache.read(KEY)
    assert found == BINARY
    assert binary_cache.read(KEY) == b"forged"


@pytest.mark.parametrize("keep", [0, 1, 31, 32, -1])
def test_a_file_that_was_cut_short_or_changed_is_not_read(stored, keep):
    content = stored.read_bytes()
    stored.write_bytes(content[:keep])
    assert binary_cache.read(KEY) is None
    stored.write_bytes(content[:40] + b"!" + content[41:])
    assert binary_cache.read(KEY) is None


def test_a_binary_under_another_key_is_not_read(stored):
    stored.rename(stored.with_name("other.cubin"))
    assert binary_cache.read("other") is None


def test_a_huge_file_is_not_read_whole(stored, monkeypatch):
    monkeypatch.setattr(binary_cache, "MAX_BYTES", 16)
    assert stored.stat().st_size > 16
    assert binary_cache.read(KEY) is None
    binary_cache.write("large", bytes(100))
    assert not stored.with_name("large.cubin").exists()


def test_without_a_home_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("INLINE_ATTENTION_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert binary_cache.location() is None
    binary_cache.write(KEY, BINARY)
    assert binary_cache.read(KEY) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # ignored
    assert binary_cache.location() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert binary_cache.location() == tmp_path / "inline_attention"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "cache", Path("/proc/self/cache")):
        monkeypatch.setenv("INLINE_ATTENTION_CACHE", str(path))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            binary_cache.write(KEY, BINARY)
        assert binary_cache.read(KEY) is None


def test_the_default_folder_of_earlier_versions_becomes_private(tmp_path, monkeypatch):
    monkeypatch.delenv("INLINE_ATTENTION_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "inline_attention"
    folder.mkdir()
    folder.chmod(0o755)
    binary_cache.write(KEY, BINARY)
    assert binary_cache.read(KEY) == BINARY
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)  # others may have written to it
    assert binary_cache.read(KEY) is None
