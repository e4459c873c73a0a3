"""Memory that can still be taken: caches of files count, limits of containers too."""

import pytest

from inline_attention.support import memory

GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 20 GiB, 1 of them unused and 12 caches of files, with control groups but no limit."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {20 * 2**20} kB\nMemFree: {2**20} kB\nMemAvailable: {13 * 2**20} kB\nHugePages: 0\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {2 * GIB}\ninactive_file {GIB}\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    return tmp_path


def test_caches_of_files_are_available(machine):
    assert memory.available_memory() == 13 * GIB


@pytest.mark.parametrize(("limit", "expected"), [(4, 2), (1, 0), (64, 13)])
def test_a_container_has_what_its_limit_leaves(machine, limit, expected):
    (machine / "memory.max").write_text(f"{limit * GIB}\n")
    assert memory.available_memory() == expected * GIB


def test_without_proc_the_system_is_asked(machine, monkeypatch):
    (machine / "meminfo").unlink()
    pages = {"SC_AVPHYS_PAGES": 5, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(memory.os, "sysconf", lambda name: pages[name])
    assert memory.available_memory() == 5 * 4096

    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(memory.os, "sysconf", unknown)
    assert memory.available_memory() is None
