import os

import pytest

from inline_attention.support.files import (
    NotARegularFileError,
    open_regular,
    read_bounded,
    replace_atomically,
    write_atomically,
)


def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link", "."):
        with pytest.raises((NotARegularFileError, IsADirectoryError)):
            open_regular(tmp_path / name)


def test_files_are_read_up_to_a_bound(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_bounded(tmp_path / "file", 4)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "file"
    write_atomically(target, "old")

    def fail(*_paths):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, b"new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_written_file_has_the_users_permissions(tmp_path):
    (tmp_path / "plain").touch()
    with replace_atomically(tmp_path / "a.bin") as temporary:
        assert temporary.suffix == ".bin"
        temporary.touch(mode=0o600)  # as safetensors does
    assert (tmp_path / "a.bin").stat().st_mode == (tmp_path / "plain").stat().st_mode
