"""What every engine of these tests is asked, so that their answers can be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable

    Prompts = list[list[int]]
    Generate = Callable[[Prompts, int], tuple[list[list[int]], list[int]]]
    """Of prompts and a number of tokens: the tokens of each, and how many of each prompt were found in the prefix cache."""

MODEL_LEN = 512


class Answers(TypedDict):
    """By round, then by prompt."""

    tokens: list[list[list[int]]]
    hits: list[list[int]]


def prompt(number: int, length: int) -> list[int]:
    """No two share a first token: within a round it is chance what is cached already."""
    return [3 + number, *(3 + (number * 131 + k * (2 * number + 3)) % 1000 for k in range(length - 1))]


def run(generate: Generate) -> Answers:
    """Three rounds; the second and the third meet what the first has left in the prefix cache."""
    answers: Answers = {"tokens": [], "hits": []}

    def ask(prompts: Prompts, max_tokens: int) -> list[list[int]]:
        tokens, hits = generate(prompts, max_tokens)
        answers["tokens"].append(tokens)
        answers["hits"].append(hits)
        return tokens

    first = [prompt(i, 20 + 25 * i) for i in range(7)]
    replies = ask(first, 24)
    # The same beginning and then something else; some as they were.
    ask([*(first[6][:150] + prompt(20 + i, 10 + 12 * i) for i in range(4)), *first[1:4]], 24)
    # What was said, the answer, and more.
    ask([first[i] + replies[i] + prompt(30 + i, 9) for i in range(2, 6)], 16)
    return answers
