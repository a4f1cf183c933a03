"""How many real answers end in a loop, where a stop would have cut them, and which others come nearest to one.

`python -m benchmarks.loops FOLDER`, with ZeroEval's outputs of Llama-3.1-8B (zeroeval_*.json), GSM8K (gsm8k_*.jsonl)
and HumanEval (humaneval.jsonl) in it.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from service.worker.loops import SCALES, period_of, periods

STEP = 64  # characters between two looks at an answer that grows
NEAREST = 10


def answers(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of the file and the text of each answer."""
    for path in sorted(folder.glob("zeroeval_*.json")):
        for row in json.loads(path.read_text()):
            output = row["output"]
            yield path.stem, output[0] if isinstance(output, list) else output
    for path in sorted([*folder.glob("gsm8k_*.jsonl"), *folder.glob("humaneval.jsonl")]):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            yield path.stem, row.get("answer") or row["canonical_solution"]


def nearness(text: str) -> float:
    """Return the largest part of a loop that the end of a text has, at each of its scales; 1 is a loop."""
    best = 0.0
    for period, wanted in periods(text):
        length = period
        while length < len(text) and text[-length - 1] == text[period - length - 1]:
            length += 1
        best = max(best, length / wanted)
    return best


def main(folder: Path) -> None:
    found = list(answers(folder))
    began = time.process_time()
    loops = [period_of(text) for _, text in found]
    took = time.process_time() - began
    left = early = looped_characters = 0
    near: list[tuple[float, str, str]] = []
    for (name, text), period in zip(found, loops, strict=True):
        best, best_at = 0.0, 0
        for end in range(SCALES[0], len(text) + 1, STEP):
            part = text[:end]
            if period_of(part):
                left += not period
                early, looped_characters = early + len(text) - end, looped_characters + len(text)
                break
            if not period and (now := nearness(part)) > best:
                best, best_at = now, end
        if best and not period:
            near.append((best, name, text[max(0, best_at - 100) : best_at]))
    print(f"{len(found):,} answers, {sum(len(text) for _, text in found):,} characters")
    print(f"{sum(map(bool, loops))} end in a loop; {left} others were in one and left it")
    print(f"a stop spares {early / max(1, looped_characters):.0%} of the characters of those that loop")
    print(f"{took / len(found) * 1e6:.1f} us of CPU time an answer")
    print("the nearest misses, as a part of a loop:")
    for part, name, end in sorted(near, reverse=True)[:NEAREST]:
        print(f"  {part:.2f} {name}: {end[-100:]!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
