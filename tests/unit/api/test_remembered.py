"""What online requests remember of the database."""

import asyncio
from collections import Counter

import pytest

from service.api import remembered
from service.api.remembered import Remembered


class Source:
    """What a database would say."""

    def __init__(self) -> None:
        self.says: dict[str, str] = {"a": "one"}
        self.asked: Counter[str] = Counter()
        self.is_down = False

    async def load(self, key: str) -> str | None:
        self.asked[key] += 1
        await asyncio.sleep(0)
        if self.is_down:
            raise ConnectionError("down")
        return self.says.get(key)


async def test_an_answer_is_asked_for_once_and_again_behind_the_callers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    known = Remembered(source.load)
    assert await asyncio.gather(*(known.get("a") for _ in range(5))) == ["one"] * 5
    assert source.asked["a"] == 1
    monkeypatch.setattr(remembered, "AGAIN_S", 0.0)
    source.says["a"] = "two"
    assert await known.get("a") == "one"
    await asyncio.sleep(0.01)
    assert await known.get("a") == "two"


async def test_what_is_gone_is_forgotten_and_what_was_never_there_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source()
    known = Remembered(source.load)
    monkeypatch.setattr(remembered, "AGAIN_S", 0.0)
    assert await known.get("b") is None
    source.says["b"] = "there"
    assert await known.get("b") == "there"
    del source.says["b"]
    await known.get("b")
    await asyncio.sleep(0.01)
    assert await known.get("b") is None


async def test_an_answer_outlives_a_database_that_is_down_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    known = Remembered(source.load)
    await known.get("a")
    source.is_down = True
    monkeypatch.setattr(remembered, "AGAIN_S", 0.0)
    for _ in range(3):
        assert await known.get("a") == "one"
        await asyncio.sleep(0.01)
    monkeypatch.setattr(remembered, "LAST_S", 0.0)
    with pytest.raises(ConnectionError):
        await known.get("a")


async def test_it_does_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    source.says = {str(n): "x" for n in range(10)}
    known = Remembered(source.load)
    monkeypatch.setattr(remembered, "MOST", 4)
    for name in source.says:
        await known.get(name)
    await known.get("9")
    assert source.asked["9"] == 1
    await known.get("0")
    assert source.asked["0"] == 2
