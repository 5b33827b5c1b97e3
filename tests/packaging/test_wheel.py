"""The wheel and the sdist that `make wheel` left in dist/: what they hold, and that both install."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

DIST = Path(__file__).parents[2] / "dist"
PTH = 'import os; os.environ.get("ENABLE_KVCACHED") and __import__("kvcached.autopatch")\n'


def only(pattern: str) -> Path:
    found = sorted(DIST.glob(pattern))
    assert len(found) == 1, f"{found or 'nothing'} for {pattern} in dist: run `make wheel`"
    return found[0]


@pytest.fixture(scope="module")
def wheel() -> Path:
    return only("kvcached-*.whl")


@pytest.fixture(scope="module")
def extension(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if ".so" in Path(name).name]
        assert libraries == ["kvcached/_core.abi3.so"]
        return Path(archive.extract(libraries[0], tmp_path_factory.mktemp("wheel")))


def run(*command: str | Path, enabled: bool = False) -> str:
    """A command in an environment that no setting of this process leaks into; its output."""
    ours = ("KVCACHED_", "ENABLE_KVCACHED", "PYTHON", "VIRTUAL_ENV")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    if enabled:
        environ["ENABLE_KVCACHED"] = "true"
    done = subprocess.run(
        [str(part) for part in command], env=environ, capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def installed(package: Path, home: Path, *options: str) -> Path:
    """Python of a fresh environment into which pip installed the package."""
    run(sys.executable, "-m", "venv", home)
    run(home / "bin" / "python", "-m", "pip", "install", "--quiet", *options, package)
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(wheel, tmp_path_factory.mktemp("installed"))


def test_one_wheel_serves_every_python_from_3_10_and_every_linux_of_glibc_2_28(wheel: Path) -> None:
    assert wheel.name.endswith("-cp310-abi3-manylinux_2_28_x86_64.whl")


def test_the_wheel_is_typed_and_brings_hooks_and_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        pth = next(name for name in names if name.endswith("/purelib/kvcached_hooks.pth"))
        assert archive.read(pth).decode() == PTH
    assert {"kvcached/py.typed", "kvcached/_core.pyi", f"{info}/licenses/LICENSE"} <= names
    assert "kvcached/verified_kernels.json" in names
    assert "kvctl=kvcached._kvctl:main" in entry_points
    assert "[vllm.general_plugins]\nkvcached=kvcached.integration.vllm.plugin:register" in entry_points
    assert "[sglang.srt.plugins]\nkvcached=kvcached.integration.sglang.plugin:register" in entry_points


def test_the_extension_needs_no_driver_to_load(extension: Path) -> None:
    undefined = run("nm", "-D", "--undefined-only", extension).split()
    assert "malloc" in {symbol.split("@")[0] for symbol in undefined}  # the list is not empty
    assert [symbol for symbol in undefined if symbol.startswith("cu")] == []
    needed = [line for line in run("readelf", "-d", extension).splitlines() if "(NEEDED)" in line]
    assert needed
    assert [line for line in needed if "cuda" in line or "python" in line] == []


def test_it_imports_without_libcuda_and_says_why_there_is_no_gpu(python: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has libcuda")
    script = "import kvcached; from kvcached import _core; print(_core.backend_available('cuda'))"
    assert "libcuda" in run(python, "-c", script)
    script = "from kvcached import _core; print(_core.backend_available('host'))"
    assert run(python, "-c", script) == "None\n"


def test_kvctl_is_on_the_path(python: Path) -> None:
    assert "list" in run(python.parent / "kvctl", "--help")


def test_hooks_are_loaded_only_where_they_are_asked_for(python: Path) -> None:
    script = "import sys; print('kvcached.autopatch' in sys.modules)"
    assert run(python, "-c", script) == "False\n"
    assert run(python, "-c", script, enabled=True) == "True\n"


def test_the_sdist_builds_and_installs(tmp_path: Path) -> None:
    sdist = only("kvcached-*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    # Without these two a build looks for a CUDA toolkit.
    assert {".cargo/config.toml", "third_party/cuda-link/lib64/libcuda.so"} <= inside
    # Not optimised: the question is whether everything is there.
    python = installed(sdist, tmp_path / "from-sdist", "--config-settings=build-args=--profile=dev")
    assert run(python, "-c", "import kvcached; print(kvcached.__version__)")
