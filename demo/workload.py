"""The requests: bursts of prompts of mixed lengths, half of them behind one shared prefix."""

from __future__ import annotations

import random
from typing import NamedTuple

FIRST_TOKEN, LAST_TOKEN = 3, 1000  # every model of demo/model.py has these, and they are not special


class Request(NamedTuple):
    """One prompt and how many tokens follow it."""

    prompt: list[int]
    max_tokens: int


def burst(seed: int, requests: int, *, max_prompt: int = 800, max_output: int = 96) -> list[Request]:
    """Requests with prompts of up to `max_prompt` tokens, each asking for 1/4 to all of `max_output`.

    The same arguments give the same requests. Every second one starts with the burst's shared prefix.
    """
    source = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [source.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]

    shared = tokens(max_prompt // 2)
    made = []
    for index in range(requests):
        prefix = shared if index % 2 else []
        own = source.randrange(16, max_prompt - len(prefix))
        made.append(Request(prefix + tokens(own), source.randrange(max_output // 4, max_output + 1)))
    return made


def bursts(count: int, requests: int, *, max_prompt: int, max_output: int) -> list[list[Request]]:
    """`count` bursts; from the third on each repeats the one two before it, as a user who asks again does."""
    return [
        burst(1 + index % 2, requests, max_prompt=max_prompt, max_output=max_output) for index in range(count)
    ]
