"""Processes of their own that hold blocks of a device which they share, and what others see of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcached import control

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ANSWER_S = 10.0

PROGRAM = """
import json, sys
from kvcached import KVCacheManager, vmm_ops
device, num_blocks, cell = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
vmm_ops.init_kvcached(device)
manager = KVCacheManager(num_blocks, 16, cell, 2)
held = []
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    word, _, number = line.strip().partition(" ")
    if word == "alloc":
        ids = manager.alloc(int(number))
        held += ids or []
        said = ids is not None
    elif word == "free":
        manager.free([held.pop() for _ in range(int(number))])
        said = manager.quiesce()
    else:
        said = manager.stats()
    print(json.dumps(said), flush=True)
manager.shutdown()
"""


class Holder:
    """A process with a manager that does what it is told: a line in, a line out.

    Args:
        name: of its instance. device: "cpu" or "cuda:N". num_blocks, block_bytes: of its pool.
        settings: variables of its environment.
    """

    def __init__(
        self,
        name: str,
        *,
        device: str = "cpu",
        num_blocks: int = 64,
        block_bytes: int = 512 << 10,
        **settings: str,
    ) -> None:
        environ = {k: v for k, v in os.environ.items() if "KVCACHED" not in k}
        environ |= {"KVCACHED_IPC_NAME": name, "KVCACHED_PAGE_MB": "2", "KVCACHED_MAX_RESERVED_MB": "0"}
        environ["KVCACHED_UNBACKED"] = "hole"  # a page of zeros would count too
        cell = block_bytes // (16 * 2 * 2)  # 16 tokens, K and V of two layers
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, device, str(num_blocks), str(cell)],
            env=environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.name = name

    def hear(self) -> Any:
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def shown(of: Holder) -> control.Instance:
    (found,) = [instance for instance in control.instances() if instance.name == of.name]
    return found


def granted(of: Holder, device: str = "host") -> int:
    """Bytes of the device's budget."""
    (budget,) = [budget for budget in control.budgets() if budget.device == device]
    (member,) = [member for member in budget.members if member.name == of.name]
    return member.granted_bytes


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + ANSWER_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@dataclass
class Tally:
    """What came of one that competes."""

    blocks: int = 0
    waits_s: list[float] = field(default_factory=list)
    waits_within_s: list[float] = field(default_factory=list)
    """For no more than what is guaranteed to it."""

    def __str__(self) -> str:
        waits = sorted(self.waits_s)
        return (
            f"{len(waits)} bursts, {self.blocks} blocks, waited {waits[len(waits) // 2]:.3f} s in the middle, "
            f"{waits[-1]:.3f} s at most"
        )


def compete(
    holders: Sequence[Holder], guaranteed: Sequence[int], unit: int, seconds: float, look: Callable[[], None]
) -> list[Tally]:
    """All take and free at the same time, as engines with bursts do: 1 to 6 units at once, and again while they are refused.

    Args:
        guaranteed: blocks of each. unit: blocks. look: called over and over meanwhile.
    """
    end, tallies = time.monotonic() + seconds, [Tally() for _ in holders]

    def bursts(one: Holder, number: int) -> None:
        source, tally = random.Random(number), tallies[number]
        while time.monotonic() < end:
            wanted, began = source.choice((1, 2, 4, 6)) * unit, time.monotonic()
            while one.ask(f"alloc {wanted}") is not True:
                if time.monotonic() > end + ANSWER_S:
                    return  # its tally tells
                time.sleep(0.002)
            waited = time.monotonic() - began
            tally.blocks += wanted
            tally.waits_s.append(waited)
            if wanted <= guaranteed[number]:
                tally.waits_within_s.append(waited)
            time.sleep(source.uniform(0.0, 0.2))
            one.ask(f"free {wanted}")
            time.sleep(source.choice((0.0, 0.0, 0.5)))

    threads = [threading.Thread(target=bursts, args=(one, number)) for number, one in enumerate(holders)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        look()
        time.sleep(0.01)
    return tallies
