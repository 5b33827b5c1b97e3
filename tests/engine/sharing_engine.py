"""A vLLM engine in a process of its own that shares this machine's memory with others: one line in, one line out."""

from __future__ import annotations

import json
import sys


def say(what: object) -> None:
    sys.stdout.write(f"SAID {json.dumps(what)}\n")
    sys.stdout.flush()


def main() -> None:
    from conftest import Engine, plugin_installed

    plugin_installed()
    engine = Engine(sys.argv[1], enable_prefix_caching=True, num_gpu_blocks_override=256)
    say({"elastic": engine.is_elastic})
    for line in sys.stdin:
        prompts, max_tokens = json.loads(line)
        tokens, hits = engine.generate(prompts, max_tokens)
        say({"tokens": tokens, "hits": hits})
    engine.shutdown()


if __name__ == "__main__":
    main()
