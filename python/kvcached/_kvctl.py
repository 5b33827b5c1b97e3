"""Console scripts `kvctl` and `kvtop`: the same code as the binary of crates/kvctl."""

import os
import signal
import sys
from pathlib import PurePath

from kvcached import _core


def main() -> int:
    """Run `kvctl` with this process's arguments, `kvctl top` where it is called kvtop; returns its exit code."""
    # Python's handler only makes a note for Python code, of which none runs until `kvctl` has ended.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # `kvctl doctor` looks at the engines that are installed beside it.
    if sys.executable:
        os.environ.setdefault("KVCACHED_PYTHON", sys.executable)
    is_kvtop = PurePath(sys.argv[0]).name == "kvtop"
    return _core.kvctl([*(["top"] if is_kvtop else []), *sys.argv[1:]])
