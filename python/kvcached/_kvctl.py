"""Console scripts `kvctl` and `kvtop`: the same code as the binary of crates/kvctl."""

import signal
import sys
from pathlib import PurePath

from kvcached import _core


def main() -> int:
    """Run `kvctl` with this process's arguments, `kvctl top` where it is called kvtop; returns its exit code."""
    # Python's handler only makes a note for Python code, of which none runs until `kvctl` has ended.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    words = sys.argv[1:]
    if PurePath(sys.argv[0]).name == "kvtop":
        words = ["top", *words]
    if words[:1] == ["doctor"]:
        words[1:1] = ["--python", sys.executable]  # unless another is asked for
    return _core.kvctl(words)
