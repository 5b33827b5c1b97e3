"""What the runs showed: a table, a JSON file and a plot of KV memory over time."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from demo.run import Burst, Run

COLOURS = {"native": "#8a8f98", "kvcached": "#0b7285"}
BURST_COLOUR = "#fff3bf"


def size(count: int) -> str:
    """Bytes for a person."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


def differing(one: Run, other: Run) -> list[tuple[int, int]]:
    """(burst, request) of every request whose tokens differ, counted from 0."""
    return [
        (b, r)
        for b, (mine, theirs) in enumerate(zip(one.bursts, other.bursts, strict=True))
        for r, (left, right) in enumerate(zip(mine.tokens, theirs.tokens, strict=True))
        if left != right
    ]


def requests_of(run: Run) -> int:
    """All requests of all bursts."""
    return sum(len(burst.tokens) for burst in run.bursts)


def verdict(native: Run, elastic: Run) -> str:
    """Are the tokens identical?"""
    wrong, total = len(differing(native, elastic)), requests_of(native)
    return f"yes, all {total} requests" if not wrong else f"NO: {wrong} of {total} requests differ"


def first_difference(native: Run, elastic: Run) -> str:
    """Where the tokens part, for the first request that differs."""
    b, r = differing(native, elastic)[0]
    left, right = native.bursts[b].tokens[r], elastic.bursts[b].tokens[r]
    at = next(i for i, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1])
    return (
        f"burst {b + 1}, request {r + 1} parts at output token {at + 1} of {len(left)}: "
        f"native {left[at : at + 6]}, kvcached {right[at : at + 6]}"
    )


def table(pairs: list[tuple[Run, Run]]) -> str:
    """One block of rows for each (native, kvcached) pair."""
    lines = [f"{'':<28}{'native':>14}{'kvcached':>14}"]
    for native, elastic in pairs:
        lines.append(f"prefix caching {'on' if native.prefix_caching else 'off'}")
        ratio = elastic.tokens_per_s / native.tokens_per_s
        rows = [
            (
                "output tokens/s",
                f"{native.tokens_per_s:,.0f}",
                f"{elastic.tokens_per_s:,.0f}",
                f"({ratio:.2f}x)",
            ),
            ("KV memory at rest", size(native.rest_bytes), size(elastic.rest_bytes), ""),
            ("  at peak", size(native.peak_bytes), size(elastic.peak_bytes), ""),
        ]
        for index, (mine, theirs) in enumerate(zip(native.bursts, elastic.bursts, strict=True)):
            name = f"  after pause {index + 1}"
            rows.append((name, size(mine.after_pause_bytes), size(theirs.after_pause_bytes), ""))
        rows.append(("virtual addresses", size(native.virtual_bytes), size(elastic.virtual_bytes), ""))
        lines += [f"  {name:<26}{left:>14}{right:>14} {note}".rstrip() for name, left, right, note in rows]
        lines.append(f"  {'tokens identical':<26}{verdict(native, elastic):>28}")
    if any(elastic.prefix_caching for _, elastic in pairs):
        lines.append(
            "What stays after a pause with prefix caching on are cached prompts, ready to be used again."
        )
    return "\n".join(lines)


def digest(burst: Burst) -> str:
    """Short name of a burst's tokens."""
    return hashlib.sha256(json.dumps(burst.tokens).encode()).hexdigest()[:16]


def record(run: Run) -> dict[str, Any]:
    """One run for the JSON file; sizes in bytes, times in seconds since the first burst began."""
    return {
        "engine": run.engine,
        "version": run.version,
        "memory": run.memory,
        "prefix_caching": run.prefix_caching,
        "start_s": round(run.start_s, 2),
        "output_tokens_per_s": round(run.tokens_per_s, 1),
        "rest_bytes": run.rest_bytes,
        "peak_bytes": run.peak_bytes,
        "virtual_bytes": run.virtual_bytes,
        "bursts": [
            {
                "begin_s": round(burst.begin_s, 3),
                "end_s": round(burst.end_s, 3),
                "requests": len(burst.tokens),
                "output_tokens": burst.tokens_out,
                "peak_bytes": burst.peak_bytes,
                "after_pause_bytes": burst.after_pause_bytes,
                "tokens_sha256": digest(burst),
            }
            for burst in run.bursts
        ],
        "samples": [
            {"time_s": round(s.time_s, 3), "used_bytes": s.used, "reserved_bytes": s.reserved}
            for s in run.samples
        ],
    }


def plot(pairs: list[tuple[Run, Run]], path: Path) -> None:
    """KV memory over time, one panel a setting of prefix caching."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(pairs), 1, figsize=(9, 1.4 + 2.7 * len(pairs)), squeeze=False, layout="constrained"
    )
    for axes, (native, elastic) in zip(panels[:, 0], pairs, strict=True):
        _panel(axes, native, elastic)
    panels[-1, 0].set_xlabel("seconds since the first request")
    figure.suptitle(f"KV cache memory of {pairs[0][0].title}, the same requests in bursts")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(axes: Axes, native: Run, elastic: Run) -> None:
    unit, name = (2**30, "GiB") if native.peak_bytes >= 4 * 2**30 else (2**20, "MiB")
    for index, burst in enumerate(elastic.bursts):
        axes.axvspan(burst.begin_s, burst.end_s, color=BURST_COLOUR, lw=0)
        middle = (burst.begin_s + burst.end_s) / 2
        axes.annotate(
            f"burst {index + 1}",
            (middle, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -3),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
            color="#846200",
        )
    times = [s.time_s for s in elastic.samples]
    mapped = [s.mapped / unit for s in elastic.samples]
    used = [s.used / unit for s in elastic.samples]
    axes.axhline(native.peak_bytes / unit, color=COLOURS["native"], lw=2, label="native, the whole KV cache")
    axes.step(times, mapped, where="post", color=COLOURS["kvcached"], lw=1.8, label="kvcached, mapped")
    axes.fill_between(
        *(times, used),
        step="post",
        color=COLOURS["kvcached"],
        alpha=0.3,
        lw=0,
        label="kvcached, pages that hold blocks",
    )
    axes.set_title(f"prefix caching {'on' if native.prefix_caching else 'off'}", loc="left", fontsize=10)
    axes.set_ylabel(name)
    axes.set_ylim(0, 1.2 * max(native.peak_bytes, elastic.peak_bytes) / unit)
    axes.set_xlim(times[0], times[-1])
    axes.spines[["top", "right"]].set_visible(False)
