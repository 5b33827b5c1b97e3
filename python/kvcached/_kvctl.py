"""Console script `kvctl`: the same code as the binary of crates/kvctl."""

import sys

from kvcached import _core


def main() -> int:
    """Run `kvctl` with this process's arguments; returns its exit code."""
    return _core.kvctl(sys.argv[1:])
