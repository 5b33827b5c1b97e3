"""What `kvctl list --json` says, ten times a second: `python -m demo.sampler`, started by `demo.run`.

A process of its own, so that it sees what any other process sees; one process, since starting Python ten
times a second would take the engine's cores. Before each answer it writes a line `@ <monotonic seconds>`.
"""

from __future__ import annotations

import sys
import time

INTERVAL_S = 0.1
MARK = "@ "


def main() -> None:
    """Until the parent closes the pipe."""
    from kvcached import _core

    while True:
        sys.stdout.write(f"{MARK}{time.monotonic():.3f}\n")
        sys.stdout.flush()
        _core.kvctl(["list", "--json"])
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)
