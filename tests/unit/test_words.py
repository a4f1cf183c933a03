"""Users read plain English: words that betray another grammar, or that nobody says, stay out of what they read."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ODD = re.compile(
    r"\b(whoever|whomever|whom|beforehand|anew|mend|mends|mended|of late|tells of|gives way|is none of)\b"
    r"|\b(goes on|for ever)\b|\bmeanwhile[.;,)]",
    re.IGNORECASE,
)
FOLDERS = ("service", "engine_ext", "benchmarks", "docs", "docker")
READ = (*FOLDERS, "README.md", "CONTRIBUTING.md", "openapi.yaml", "Makefile")
NOT_OURS = ("/static/", "service/demo/data/")  # libraries of others, and text that models are given


def texts(path: Path) -> list[tuple[int, str]]:
    """Lines to read with their numbers; of Python its strings and comments."""
    if path.suffix != ".py":
        return list(enumerate(path.read_text().splitlines(), 1))
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    kinds = (tokenize.STRING, tokenize.COMMENT)
    return [(token.start[0], token.string) for token in tokens if token.type in kinds]


def files(place: str) -> list[Path]:
    found = [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*"))
    found = [path for path in found if path.suffix in ("", ".py", ".md", ".html", ".yaml", ".yml", ".json", ".js")]
    return [path for path in found if path.is_file() and not any(part in str(path) for part in NOT_OURS)]


@pytest.mark.parametrize("place", READ)
def test_what_people_read_is_plain_english(place: str) -> None:
    paths = files(place)
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in paths
        for number, text in texts(path)
        if (match := ODD.search(text))
    ]
    assert not found, "\n".join(found)


def test_odd_words_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('whom = 1\n"""Tells whoever asks."""\n')
    assert [number for number, text in texts(tmp_path / "a.py") if ODD.search(text)] == [2]
