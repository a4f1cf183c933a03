"""The machines of one engine see each other on a roll, and notice who is gone."""

import math
import time
from collections.abc import Callable

import pytest
import redis as sync_redis
from redis.exceptions import RedisError

from service.queue import roll
from service.worker.following import ABSENT, Peers
from service.worker.nodes import Nodes


@pytest.fixture
def node(redis_url: str) -> Callable[[int], Peers]:
    def on_lost(rank: int) -> None:
        raise AssertionError(rank)

    return lambda rank: Peers(redis_url, "m", Nodes(3, rank, "first:20000"), on_lost)


def test_a_node_that_left_is_gone_after_some_looks(node: Callable[[int], Peers]) -> None:
    leader, first, second = node(0), node(1), node(2)
    assert [each.look() for each in (first, second, leader)] == [None] * 3
    assert len(leader.hosts) == 2
    second.leave()
    assert [leader.look() for _ in range(ABSENT)] == [None] * (ABSENT - 1) + [2]
    assert len(leader.hosts) == 1


def test_a_killed_node_is_gone_a_while_later(node: Callable[[int], Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = node(0), node(1)
    follower.look()
    monkeypatch.setattr(roll, "SILENT_S", -1)
    assert [leader.look() for _ in range(ABSENT + 1)] == [None] * (ABSENT + 1), "it was never seen"
    monkeypatch.setattr(roll, "SILENT_S", 60)
    follower.look()
    assert leader.look() is None
    monkeypatch.setattr(roll, "SILENT_S", -1)
    assert [leader.look() for _ in range(ABSENT)] == [None] * (ABSENT - 1) + [1]


def test_a_follower_misses_only_its_leader(node: Callable[[int], Peers]) -> None:
    leader, first, second = node(0), node(1), node(2)
    for each in (leader, second, first):
        each.look()
    assert first.leader_is_there()
    second.leave()
    assert [first.look() for _ in range(ABSENT + 1)] == [None] * (ABSENT + 1)
    leader.leave()
    assert not first.leader_is_there()
    assert [first.look() for _ in range(ABSENT)] == [None] * (ABSENT - 1) + [0]


def test_a_node_that_starts_again_is_gone_at_once(
    node: Callable[[int], Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not a part of the engine that it was in, and SGLang would wait for it."""
    node(2).look()  # of the engine before
    leader, first, second = node(0), node(1), node(2)
    for each in (leader, second, first, leader, first):
        assert each.look() is None
    monkeypatch.setattr(time, "monotonic", lambda: math.inf)
    node(2).look()
    assert leader.look() == 2
    assert first.look() is None
    node(0).look()
    assert first.look() == 0


def test_a_wiped_redis_ends_no_engine(node: Callable[[int], Peers], redis_url: str) -> None:
    leader, follower = node(0), node(1)
    follower.look()
    for _ in range(2 * ABSENT):
        sync_redis.Redis.from_url(redis_url).flushall()
        assert leader.look() is None
        follower.look()
        assert leader.look() is None


def test_nobody_is_gone_while_redis_does_not_answer() -> None:
    nowhere = Peers("unix:///nowhere.sock", "m", Nodes(2, 1, "first:20000"), lambda _: None)
    with pytest.raises(RedisError):
        nowhere.look()
    assert nowhere.leader_is_there()
    nowhere.leave()
