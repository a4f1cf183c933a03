"""Read real request lengths and prompts as rows of a workload, from a folder with lengths/, text/ and tokenizers/."""

import base64
import csv
import io
import itertools
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import build_tree

Segments = list[tuple[str, int]]

SYSTEM_TOKENS = 20  # a system prompt before each prompt, which the traces do not contain (BlendServe A.3)
LONGEST = 32_768  # tokens of prompt and answer; longer rows are dropped
MMLU_ANSWER = 2  # tokens: the letter and the end
LONG_PROMPT = 100
LONG_MEAN, LONG_SIGMA = 16_384, 0.6
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Row:
    segments: Segments
    output_tokens: int
    trace: str


def csv_trace(data: Path, name: str, count: int, seed: int) -> list[Row]:
    """Return rows of a lengths file in random order, and start again from the first if it has too few."""
    rows: list[tuple[int, int]] = []
    with (data / "lengths" / f"{name}.csv").open() as file:
        for line in csv.DictReader(file):
            prompt = int(line.get("ContextTokens") or line["input_tokens"])
            output = int(line.get("GeneratedTokens") or line.get("output_tokens") or 0)
            if prompt >= 1 and output >= 1 and prompt + output <= LONGEST:
                rows.append((prompt, output))
    order = np.random.default_rng(seed).permutation(len(rows))
    found: list[Row] = []
    for number in range(count):
        prompt, output = rows[order[number % len(order)]]
        own = max(1, prompt - SYSTEM_TOKENS)
        found.append(Row([(f"{name}/system", SYSTEM_TOKENS), (f"{name}/{number}", own)], output, name))
    return found


def long_outputs(count: int, seed: int) -> list[Row]:
    """Return SYNTHETIC lognormal answers of 16K tokens on average, in place of OpenVid's videos."""
    generator = np.random.default_rng(seed)
    mu = np.log(LONG_MEAN) - LONG_SIGMA**2 / 2
    outputs = np.maximum(1, generator.lognormal(mu, LONG_SIGMA, count)).astype(int).tolist()
    name = "long"
    return [
        Row([(f"{name}/system", SYSTEM_TOKENS), (f"{name}/{number}", LONG_PROMPT)], output, name)
        for number, output in enumerate(outputs)
    ]


def documents(count: int, questions: int, tokens: int, seed: int) -> list[Row]:
    """Return SYNTHETIC documents of about `tokens` tokens, with several short questions each."""
    generator = np.random.default_rng(seed)
    rows: list[Row] = []
    for number in range(count):
        size = int(generator.integers(tokens // 2, tokens * 3 // 2))
        for question in range(questions):
            own = int(generator.integers(20, 60))
            segments = [("documents/system", SYSTEM_TOKENS), (f"document/{number}", size)]
            rows.append(
                Row([*segments, (f"question/{number}/{question}", own)], int(generator.integers(16, 128)), "documents")
            )
    return rows


def mooncake(data: Path, count: int) -> list[Row]:
    """Return rows with real prefixes in blocks of 512 tokens; the last block of a prompt may be shorter."""
    rows: list[Row] = []
    with (data / "lengths" / "mooncake_synthetic.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
        for number in range(count):
            again, found = number // len(lines), lines[number % len(lines)]
            blocks, left = found["hash_ids"], found["input_length"]
            sizes = [512] * (len(blocks) - 1) + [left - 512 * (len(blocks) - 1)]
            segments = [(f"mooncake/{again}/{block}", size) for block, size in zip(blocks, sizes, strict=True)]
            rows.append(Row(segments, max(1, found["output_length"]), "mooncake"))
    return rows


def mmlu(data: Path, count: int) -> list[Row]:
    """Return 5-shot prompts. Beyond 14,042 questions the examples come in another order, so that no prompt repeats."""
    encoding = _qwen(data)

    def tokens(text: str) -> list[int]:
        return encoding.encode(text, disallowed_special=())

    subjects = dict(_mmlu_subjects(data))
    header = {name: len(tokens(_header(name))) for name in subjects}
    shots = {name: [len(tokens(_example(row, answer=True))) for row in dev] for name, (dev, _) in subjects.items()}
    questions: list[tuple[str, Segments]] = []
    for name, (_, test) in subjects.items():
        asked = [tokens(_example(row, answer=False)) for row in test]
        questions += [(name, segments) for segments in _shared_segments(asked, f"{name}/question")]
    orders = list(itertools.permutations(range(5)))
    if count > len(questions) * len(orders):
        raise ValueError(f"MMLU gives {len(questions) * len(orders)} different prompts, not {count}")
    rows: list[Row] = []
    for number in range(count):
        name, question = questions[number % len(questions)]
        order = orders[number // len(questions)]
        segments = [(f"{name}/header", header[name])]
        segments += [(f"{name}/example/{shot}", shots[name][shot]) for shot in order]
        rows.append(Row([*segments, *question], MMLU_ANSWER, "mmlu"))
    return rows


def _shared_segments(prompts: list[list[int]], name: str) -> list[Segments]:
    """Cut token lists into segments where they diverge: questions of a subject often begin alike."""
    tree = build_tree(Prompts.of(prompts))
    found: list[Segments] = [[] for _ in prompts]
    for node in range(1, len(tree)):  # parents come first
        size = int(tree.end[node] - tree.begin[node])
        for request in tree.order[tree.first[node] : tree.last[node]].tolist() if size else []:
            found[request].append((f"{name}/{node}", size))
    return found


def _mmlu_subjects(data: Path) -> Iterator[tuple[str, tuple[list[list[str]], list[list[str]]]]]:
    """Yield each subject with its examples and questions."""
    with zipfile.ZipFile(data / "text" / "mmlu.zip") as archive:
        names = sorted(Path(name).name.removesuffix("_test.csv") for name in archive.namelist() if "_test.csv" in name)
        for name in names:
            parts: list[list[list[str]]] = []
            for part in ("dev", "test"):
                with archive.open(f"data/{part}/{name}_{part}.csv") as file:
                    parts.append(list(csv.reader(io.TextIOWrapper(file, "utf-8", newline=""))))
            yield name, (parts[0][:5], parts[1])


def _header(subject: str) -> str:
    about = subject.replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {about}.\n\n"


def _example(row: list[str], answer: bool) -> str:
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", row[1:5], strict=True))
    return f"{row[0]}\n{choices}\nAnswer:" + (f" {row[5]}\n\n" if answer else "")


def _qwen(data: Path) -> tiktoken.Encoding:
    ranks: dict[bytes, int] = {}
    for line in (data / "tokenizers" / "qwen.tiktoken").read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding("qwen", pat_str=QWEN_PATTERN, mergeable_ranks=ranks, special_tokens={})
