"""What the runs of bench.matrix say: comparison of tokens and the two tables; how all of bench shows a number. Pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from bench.harness import Tokens


def number(value: float) -> str:
    """Three significant digits, and no fewer than all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Run(NamedTuple):
    """One engine process: its RESULT rows, and the tokens of each pass."""

    rows: list[dict[str, Any]]
    tokens: list[Tokens]

    @property
    def passes(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["event"] == "pass"]

    def at(self, event: str) -> dict[str, Any]:
        """The first row of that event, empty without one."""
        return next((row for row in self.rows if row["event"] == event), {})

    @property
    def speed(self) -> tuple[float, float]:
        """Output tokens/s of the first pass, and the median of the later ones."""
        found = [row["output_tokens_per_s"] for row in self.passes]
        if len(found) < 2:
            return float("nan"), float("nan")
        return found[0], statistics.median(found[1:])

    @property
    def memory(self) -> str:
        """MiB of the device after the start / at the peak / idle / with the prefix cache given back."""
        peak = max((row["peak_mib"] for row in self.passes), default=None)
        used = [self.at(event).get("used_mib") for event in ("start", "idle", "reset")]
        shown = [used[0], peak, *used[1:]]
        return " / ".join("-" if mib is None else f"{mib:,}" for mib in shown)


NO_RUN = Run([], [])
Results = dict[tuple[str, str], dict[str, Run]]  # by engine and prefix caching, then by the run's name


def equal_requests(one: Tokens, other: Tokens) -> int:
    """How many requests have the same tokens in both."""
    return sum(mine == theirs for mine, theirs in zip(one, other, strict=True))


def compare(native: Tokens, again: Tokens, other: Tokens) -> str:
    """One pass. Only where native equals itself does a difference, or its absence, prove anything."""
    total = len(native)
    repeats, mine = equal_requests(native, again), equal_requests(native, other)
    if repeats < total:
        return f"{mine} of {total} requests (native again {repeats})"
    return "equal" if mine == total else f"DIFFERS: {total - mine} of {total} requests"


def verdict(native: Run, again: Run, other: Run) -> str:
    """Do the tokens of `other` equal native's, pass by pass, and its prefix hits?"""
    passes = len(native.tokens)
    if not passes or not other.tokens:
        return "not run"
    if not len(again.tokens) == len(other.tokens) == passes:
        return f"ended early: {len(other.tokens)} passes, native {passes} and {len(again.tokens)}"
    each = [compare(*of_pass) for of_pass in zip(native.tokens, again.tokens, other.tokens, strict=True)]
    said = f"equal in {passes} of {passes}" if set(each) == {"equal"} else "; ".join(each)
    hits = sum(
        mine["cached_tokens"] == theirs["cached_tokens"]
        for mine, theirs in zip(native.passes, other.passes, strict=True)
    )
    return said + (", hits equal" if hits == passes else f", HITS EQUAL IN {hits} OF {passes}")


def tokens_table(results: Results) -> str:
    """A row for each engine and setting of prefix caching."""
    lines = [
        "| engine | prefix caching | tokens hit in each pass | digests of native | kvcached | highest pages first |",
        "|---|---|---|---|---|---|",
    ]
    for (engine, caching), runs in results.items():
        native, again, ours, top = (runs.get(name, NO_RUN) for name in ("native", "native2", "ours", "top"))
        hits = " / ".join(f"{row['cached_tokens']:,}" for row in native.passes)
        digests = " ".join(row["digest"][:8] for row in native.passes)
        lines.append(
            f"| {engine} | {caching} | {hits} | {digests} "
            f"| {verdict(native, again, ours)} | {verdict(native, again, top)} |"
        )
    return "\n".join(lines)


def speed_table(results: Results) -> str:
    """A row for each run, with ratios to native of the same engine and setting."""
    lines = [
        "| engine | prefix caching | run | first pass, tokens/s | ratio | same prompts again, tokens/s | ratio "
        "| tokens hit in each pass | MiB after start / peak / idle / prefix cache given back |",
        "|---|---|---|--:|--:|--:|--:|---|--:|",
    ]
    for (engine, caching), runs in results.items():
        native = runs.get("native", NO_RUN).speed
        for name, run in runs.items():
            first, later = run.speed
            hits = " / ".join(f"{row['cached_tokens']:,}" for row in run.passes)
            lines.append(
                f"| {engine} | {caching} | {name} | {first:,.0f} | {first / native[0]:.3f} "
                f"| {later:,.0f} | {later / native[1]:.3f} | {hits} | {run.memory} |"
            )
    return "\n".join(lines)
