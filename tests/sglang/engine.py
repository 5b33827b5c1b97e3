"""A whole SGLang on the CPU: `engine.py MODEL ARGUMENTS OUTCOME.json`, ARGUMENTS those of `sglang.Engine`, as JSON.

SGLang spawns its scheduler, and what is spawned imports this file again: what TEST_HOOK names is done there too, before
anything of ours is used.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workload import MODEL_LEN, prompt, run

SETTLED_S = 20.0
EPOCHS_OF_PLENTY = 8
REFUSALS_OF_A_SHORTAGE = 10
PAGE = 2 << 20


def shift_a_layer() -> None:
    """Layer 1's V one block too early: a mapping that is wrong, and that tokens must show."""
    import ctypes

    import torch

    from kvcached.integration.rank import RankMemory

    tensors = RankMemory.tensors

    def shifted(self: RankMemory) -> dict[str, torch.Tensor]:
        assert self.plan is not None
        buffer = self.ftensor.buffers()[self.plan.agreement.buffers.index("v1")]
        memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.ptr - self.plan.agreement.block_bytes)
        memory._owner = buffer  # type: ignore[attr-defined]
        return tensors(self) | {"v1": torch.frombuffer(memory, dtype=torch.int8)}

    RankMemory.tensors = shifted  # type: ignore[method-assign]


def share_the_device() -> None:
    """A neighbour takes all memory that is left, and gives it back when this engine has waited for it, over and over."""
    from bounded import BoundedPool

    from kvcached import _core

    class SharedPool(BoundedPool):
        plenty, none = 1 << 20, 0
        epochs = refusals = shortages = 0

        def begin_epoch(self) -> int:
            self.epochs += 1
            if self.budget_pages == self.plenty and self.epochs >= EPOCHS_OF_PLENTY:
                self.budget_pages, self.refusals = self.none, 0
            return super().begin_epoch()

        def refused(self) -> None:
            self.refusals += 1
            if self.budget_pages == self.none and self.refusals >= REFUSALS_OF_A_SHORTAGE:
                self.budget_pages, self.epochs = self.plenty, 0
                self.shortages += 1
                logging.getLogger("kvcached").warning("shortage %d is over", self.shortages)

    _core.Pool = SharedPool  # type: ignore[misc]


def press_for_memory() -> None:
    """Somebody wants a page of cached prefixes every few milliseconds, whatever the scheduler is at."""
    import threading

    from kvcached.integration.sglang import admission, eviction

    adopt = eviction.adopt

    def pressed(scheduler: Any) -> None:
        adopt(scheduler)
        memory = scheduler.token_to_kv_pool_allocator.memory

        def press() -> None:
            given = 0
            while memory.pool is not None:
                more = memory.give_cached(1, timeout_s=1.0)
                if more and given // (16 << 20) != (given + more) // (16 << 20):
                    logging.getLogger("kvcached").warning("%d MiB of prefixes were given", given >> 20)
                given += more
                time.sleep(0.003)

        threading.Thread(target=press, daemon=True).start()

    eviction.adopt = admission.adopt = pressed


HOOKS = {"shift": shift_a_layer, "share": share_the_device, "press": press_for_memory}
if "TEST_HOOK" in os.environ:
    HOOKS[os.environ["TEST_HOOK"]]()


def memory(name: str) -> dict[str, Any] | None:
    """What `kvctl` says of this instance."""
    code = "import sys; from kvcached import _core; sys.exit(_core.kvctl(['list', '--json']))"
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found = [row for row in json.loads(listed.stdout)["instances"] if row["name"] == name]
    return {key: found[0][key] for key in ("used_bytes", "reserved_bytes")} if found else None


NEIGHBOUR = """
import time
from kvcached import KVCacheManager, vmm_ops
vmm_ops.init_kvcached("cpu")
manager = KVCacheManager(64, 16, 16 << 10, 2)  # blocks of 1 MiB
end, ids = time.monotonic() + 20, None
while ids is None and time.monotonic() < end:
    ids = manager.alloc(50)  # asks again, as schedulers do
    time.sleep(0.005)
print("HAS", len(ids or []), flush=True)
manager.shutdown()
"""


def neighbour(name: str) -> dict[str, Any]:
    """What a process gets that wants most of the budget, and what is left to this engine then."""
    environment = os.environ | {"KVCACHED_IPC_NAME": f"{name}-neighbour", "KVCACHED_MAX_RESERVED_MB": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = [line for line in process.stdout if line.startswith("HAS ")]
        return {"blocks": int(said[0].split()[1]) if said else None, "left": memory(name)}


def idle(name: str) -> dict[str, Any] | None:
    """Memory when nobody has asked for anything for a while."""
    limit = time.monotonic() + SETTLED_S
    while (found := memory(name)) is not None and time.monotonic() < limit:
        if found["used_bytes"] <= PAGE:
            break
        time.sleep(0.1)
    return found


def main(model: str, arguments: str, outcome: str) -> None:
    import sglang

    defaults = {
        "dtype": "float32",
        "context_length": MODEL_LEN,
        "skip_tokenizer_init": True,
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mem_fraction_static": 0.2,
        "disable_cuda_graph": True,
        "max_total_tokens": 4096,
        "chunked_prefill_size": 64,
        "random_seed": 0,
        "log_level": "warning",
    }
    engine = sglang.Engine(model_path=model, **defaults | json.loads(arguments))
    name = os.environ.get("KVCACHED_IPC_NAME", "")
    result: dict[str, Any] = {"started": memory(name)}

    def generate(prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], list[int]]:
        sampling = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=[sampling] * len(prompts))
        hits = [output["meta_info"]["cached_tokens"] for output in outputs]
        return [list(output["output_ids"]) for output in outputs], hits

    result |= run(generate)
    limit = time.monotonic() + SETTLED_S
    result["loaded"] = memory(name)
    if "TEST_NEIGHBOUR" in os.environ:
        result["neighbour"] = neighbour(name)
        tokens, _ = generate([prompt(i, 20 + 25 * i) for i in range(7)], 24)
        result["again"] = tokens
    if "KVCACHED_CACHE_IDLE_S" in os.environ:
        result["idle"] = idle(name)
    while not engine.flush_cache().success and time.monotonic() < limit:
        time.sleep(0.05)  # the scheduler may have a batch in flight still
    while time.monotonic() < limit:
        result["flushed"] = memory(name)
        if result["flushed"] is None or result["flushed"]["used_bytes"] <= result["started"]["used_bytes"]:
            break
        time.sleep(0.05)
    Path(outcome).write_text(json.dumps(result))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
