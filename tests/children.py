"""Processes that a test starts: forks that must not hang, scripts, and deaths that are wanted."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import subprocess
import sys
import traceback
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Outcome(NamedTuple):
    code: int  # minus the signal that ended it
    said: str


def in_fork(body: Callable[[], object], *, seconds: int = 30) -> Outcome:
    """Runs `body` in a fork, which exits with 0 where it returns and is killed where it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # The handler of pytest-timeout is Python code: it would never run in a child that waits for a lock.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            body()
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    return Outcome(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said)


def dies_touching(body: Callable[[], object]) -> bool:
    return in_fork(body).code == -signal.SIGSEGV


def run_script(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
