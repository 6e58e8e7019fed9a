"""What a user meets first: the import, refused environments, byte texts, the commands."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

import relax_disc
from relax_disc import compatibility
from relax_disc.bytes_text import format_bytes, parse_bytes
from relax_disc.errors import InputMismatchError, RelaxDiscWarning, UnsupportedEnvironmentError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (8 * 2**30, 8 * 2**30),
        ("8GiB", 8 * 2**30),
        (" 8 gib ", 8 * 2**30),
        ("1.5kB", 1500),
        ("0.1 GB", 10**8),
        ("4096", 4096),
        ("3B", 3),
    ],
)
def test_parse_bytes(value, expected):
    assert parse_bytes(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        *(0.5, 8e9, float("nan"), True, None, 0, -5, np.array([10**9])),
        *("0B", "half", "8 XB", "2.5", 2**63, "9EiB", "9000000TiB"),
    ],
)
def test_parse_bytes_refuses_and_names_the_value(value):
    with pytest.raises(InputMismatchError, match=re.escape(f"budget={value!r}")):
        parse_bytes(value, name="budget")


@given(st.integers(1, 2**50))
def test_format_bytes_reads_back_within_its_digits(count):
    assert abs(parse_bytes(format_bytes(count)) - count) <= count * 0.006


def test_wrong_version_is_refused_with_the_command_that_mends_it(monkeypatch):
    monkeypatch.setattr(compatibility.metadata, "version", lambda package: "0.0.1")
    with pytest.raises(UnsupportedEnvironmentError) as caught:
        compatibility.check_environment()
    message = str(caught.value)
    assert "apache-tvm 0.0.1 and apache-tvm-ffi 0.0.1 and torch 0.0.1" in message
    pins = "'apache-tvm==0.27.0.post1' 'apache-tvm-ffi==0.1.14.post1' 'torch==2.13.*'"
    assert f"pip install {pins}" in message


@pytest.mark.parametrize(
    ("found", "fits"), [("2.13.0+cpu", True), ("2.13.1", True), ("2.15.0", False)]
)
def test_any_release_of_the_right_pytorch_will_do(monkeypatch, found, fits):
    versions = {**compatibility.SUPPORTED_VERSIONS, "torch": found}
    monkeypatch.setattr(compatibility, "_installed_version", versions.get)
    if fits:
        compatibility.check_environment()
    else:
        with pytest.raises(UnsupportedEnvironmentError, match=r"torch 2\.15\.0"):
            compatibility.check_environment()


def test_another_pytorch_passes_where_the_environment_says_so(monkeypatch):
    versions = {**compatibility.SUPPORTED_VERSIONS, "torch": "2.11.0"}
    monkeypatch.setattr(compatibility, "_installed_version", versions.get)
    monkeypatch.setenv(compatibility.UNTESTED_TORCH, "1")
    with pytest.warns(RelaxDiscWarning, match=r"lets torch 2\.11\.0 pass"):
        compatibility.check_environment()
    versions["apache-tvm"] = "0.28"  # that would crash
    with pytest.raises(UnsupportedEnvironmentError, match=r"apache-tvm 0\.28"):
        compatibility.check_environment()


def test_missing_package_is_refused(monkeypatch):
    monkeypatch.setattr(compatibility, "_installed_version", lambda package: None)
    with pytest.raises(UnsupportedEnvironmentError, match=r"apache-tvm \(not installed\)"):
        compatibility.check_environment()


def test_windows_is_refused(monkeypatch):
    monkeypatch.setattr(compatibility.sys, "platform", "win32")
    with pytest.raises(UnsupportedEnvironmentError, match="Windows"):
        compatibility.check_environment()


def test_versions_are_checked_before_tvm_is_loaded():
    """A wrong version crashes TVM's own import, so the check must not need it."""
    program = (
        "import sys\n"
        "from importlib import metadata\n"
        "metadata.version = lambda name: '9.9'\n"
        "try:\n"
        "    import relax_disc\n"
        "except ImportError as error:\n"
        "    print('tvm' in sys.modules, 'tvm_ffi' in sys.modules, type(error).__name__)\n"
    )
    root = Path(relax_disc.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.split() == ["False", "False", "UnsupportedEnvironmentError"], done.stderr


def test_versions_agree_with_the_package_metadata(repository):
    text = (repository / "pyproject.toml").read_text()
    for package, version in compatibility.SUPPORTED_VERSIONS.items():
        assert f'"{package}=={version}"' in text
    assert f'version = "{relax_disc.__version__}"' in text


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = relax_disc.nonsense


def test_every_public_name_is_listed_and_loads():
    assert set(relax_disc.__all__) <= set(dir(relax_disc))
    for name in relax_disc.__all__:
        assert getattr(relax_disc, name) is not None


def test_the_import_registers_the_pipeline():
    """`relax.build(mod, relax_pipeline="relax_disc")` finds it, whatever else was loaded."""
    assert relax.get_pipeline("relax_disc").info.name == "relax_disc"


def test_pipeline_is_a_function_under_its_public_name():
    options = relax_disc.pipeline.PipelineOptions(plan_arena=False)
    assert relax_disc.pipeline(options).info.name == "relax_disc"


def test_the_tests_import_this_checkout(repository):
    """An editable install of another checkout comes before PYTHONPATH."""
    assert Path(relax_disc.__file__).is_relative_to(repository)
