"""How many real answers end in a loop, where a stop would have cut them, and which others come nearest to one.

`python -m benchmarks.loops FOLDER TOKENIZER`, with ZeroEval's outputs of Llama-3.1-8B (zeroeval_*.json), GSM8K
(gsm8k_*.jsonl) and HumanEval (humaneval.jsonl) in the folder, and a model's tokenizer.json. First by characters, as the
worker judges ends (`service/worker/loops.py`), then by tokens, as the engine stops (`engine_ext/plugin/repeats.py`).
"""

import json
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from engine_ext.plugin.repeats import EVERY, LEAST, Repeat, repeat_of
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


def by_characters(found: list[tuple[str, str]]) -> None:
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


def stop_of(ids: "array[int]") -> tuple[int, Repeat, Repeat, int]:
    """Return where the engine stops, with the loop, or 0; the repeat nearest to a loop before; the number of looks."""
    at, looks, nearest = LEAST, 0, Repeat()
    while at <= len(ids):
        found, looks = repeat_of(ids[:at]), looks + 1
        if found.due_in == 0:
            return at, found, nearest, looks
        nearest = max(nearest, found, key=lambda each: each.tokens / each.wanted)
        at += min(found.due_in, EVERY)
    return 0, Repeat(), nearest, looks


def by_tokens(found: list[tuple[str, str]], tokenizer: Tokenizer) -> None:
    all_ids = [array("q", each.ids) for each in tokenizer.encode_batch([text for _, text in found])]
    began = time.process_time()
    stops = [stop_of(ids) for ids in all_ids]
    took, tokens = time.process_time() - began, sum(map(len, all_ids))
    stopped = [(ids, stop) for ids, stop in zip(all_ids, stops, strict=True) if stop[0]]
    # Some drift from one loop into another; the last token may be half of one, by the limit that cut it off.
    left = sum(repeat_of(ids[:-1]).due_in > 0 for ids, _ in stopped)
    spared, whole = sum(len(ids) - stop[0] for ids, stop in stopped), sum(len(ids) for ids, _ in stopped)
    print(f"{tokens:,} tokens; {len(stopped)} answers are stopped, of which {left} did not end in a loop")
    print(f"the stop spares {spared / max(1, whole):.0%} of the tokens of those")
    print(
        f"{took / sum(looks for *_, looks in stops) * 1e6:.1f} us of CPU time a look, {took / tokens * 1e6:.2f} a token"
    )
    print("the nearest misses, as a part of a loop:")
    near = [
        (each.tokens / each.wanted, each, name)
        for (name, _), (at, _, each, _) in zip(found, stops, strict=True)
        if not at
    ]
    for part, each, name in sorted(near, reverse=True)[:NEAREST]:
        print(f"  {part:.2f} {name}: {each.tokens} tokens repeat a period of {each.period}")


def main(folder: Path, tokenizer: Path) -> None:
    found = list(answers(folder))
    by_characters(found)
    by_tokens(found, Tokenizer.from_file(str(tokenizer)))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
