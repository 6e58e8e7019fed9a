"""What tests of the caches start from."""

import pytest

from relax_disc.vm_builtins import native


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache of programs that keeps the native library of the real one."""
    native.load()
    monkeypatch.setenv("RELAX_DISC_CACHE", str(tmp_path))
    monkeypatch.delenv("RELAX_DISC_COMPILE_CACHE", raising=False)
    return tmp_path / "programs"
