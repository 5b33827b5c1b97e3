"""The main job as a command: one engine natively, then on kvcached, the same requests."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from demo import report
from demo.engine import Job, dtype_of
from demo.engines import ENGINES
from demo.model import SHAPES
from demo.run import Run, RunError, run


def positive(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="which engine (default vllm)")
    parser.add_argument("--model-size", choices=SHAPES, help="default: tiny on a CPU, 1b on a GPU")
    parser.add_argument(
        "--bursts", type=positive, default=3, help="from the third on they repeat (default 3)"
    )
    parser.add_argument("--requests", type=positive, help="in a burst; default: 14 on a CPU, 64 on a GPU")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds after each burst (default 2)")
    parser.add_argument("--prefix-caching", choices=["off", "on", "both"], default="both")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results (default ./out)")
    return parser.parse_args()


def device() -> str:
    """ "cuda" where torch sees a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    """Exit code 0: the tokens are identical. 1: they are not, or an engine failed."""
    chosen, where = options(), device()
    size = chosen.model_size or ("tiny" if where == "cpu" else "1b")
    requests = chosen.requests or (14 if where == "cpu" else 64)
    folder = chosen.out / f"model-{size}-{dtype_of(where)}"
    settings = {"off": [False], "on": [True], "both": [False, True]}[chosen.prefix_caching]
    chosen.out.mkdir(parents=True, exist_ok=True)
    print(
        f"{ENGINES[chosen.engine].title} on a {'GPU' if where == 'cuda' else 'CPU'}, a {size} Llama with "
        f"random weights: {chosen.bursts} bursts of {requests} requests, {chosen.pause:g} s apart."
    )

    def story(caching: bool, elastic: bool, note: str = "") -> Run:
        name, setting = "kvcached" if elastic else "native", "on" if caching else "off"
        print(f"  {name}, prefix caching {setting}{note}", flush=True)
        job = Job(
            engine=chosen.engine,
            model_folder=str(folder),
            model_size=size,
            device=where,
            prefix_caching=caching,
            bursts=chosen.bursts,
            requests=requests,
            pause_s=chosen.pause,
        )
        return run(job, elastic=elastic, log=chosen.out / f"{chosen.engine}-{name}-{setting}.log")

    pairs, again = [], []
    try:
        for caching in settings:
            native, elastic = story(caching, elastic=False), story(caching, elastic=True)
            pairs.append((native, elastic))
            if where != "cpu" and report.differing(native, elastic):
                # On a GPU another batch means other roundings: is native equal to itself?
                again.append((native, story(caching, elastic=False, note=", once more")))
    except RunError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130

    plot, facts = chosen.out / f"kv-memory-{chosen.engine}.png", chosen.out / f"demo-{chosen.engine}.json"
    report.plot(pairs, plot)
    results = {
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device": where,
        "model": {"size": size, **SHAPES[size]._asdict()},
        "tokens_identical": not any(report.differing(*pair) for pair in pairs),
        "runs": [report.record(one) for pair in pairs for one in pair],
    }
    facts.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{report.table(pairs)}\n\nwritten: {facts}, {plot}")
    return judge(pairs, again)


def judge(pairs: list[tuple[Run, Run]], again: list[tuple[Run, Run]]) -> int:
    """Say what differs and decide the exit code."""
    wrong = [pair for pair in pairs if report.differing(*pair)]
    if not wrong:
        return 0
    for pair in wrong:
        setting = "on" if pair[0].prefix_caching else "off"
        print(f"prefix caching {setting}: {report.first_difference(*pair)}", file=sys.stderr)
    if not again:
        print("failed: on a CPU in float32 the tokens must be identical.", file=sys.stderr)
        return 1
    code = 0
    for pair, repeat in zip(wrong, again, strict=True):
        ours, native = len(report.differing(*pair)), len(report.differing(*repeat))
        print(
            f"of {report.requests_of(pair[0])} requests {ours} differ from native; "
            f"{native} differ when native is run twice.",
            file=sys.stderr,
        )
        if not native:
            print("failed: native repeats itself, so kvcached must too.", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
