"""Compares answers of one engine: with random weights, two tokens are often nearly as likely."""

from collections.abc import Sequence
from typing import Any

NEAR = 0.05  # of log probability: which of two such tokens is chosen depends on rounding


def compare(reference: dict[str, Any], answers: Sequence[Sequence[int]]) -> dict[str, int]:
    """Count answers that agree with a run's, those that differ first where two tokens were nearly alike, and others.

    `reference`: what BenchEngine.run returned, with the two likeliest tokens of each place where they were asked for.
    """
    found = {"agreed": 0, "near": 0, "wrong": 0}
    for meta, expected, got in zip(reference["metas"], reference["answers"], answers, strict=True):
        place = next((k for k, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
        if place is None:
            found["agreed" if len(expected) == len(got) else "wrong"] += 1
            continue
        tops = meta.get("output_top_logprobs") or []
        likeliest = tops[place] if place < len(tops) and tops[place] else []
        is_near = len(likeliest) > 1 and likeliest[0][0] - likeliest[1][0] < NEAR
        found["near" if is_near else "wrong"] += 1
    return found
