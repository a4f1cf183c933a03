"""On which machines engines go."""

from service.fleet.placement import make_room, most_engines, place


def test_an_engine_goes_where_it_leaves_the_least() -> None:
    assert place({"a": 8, "b": 3, "c": 2}, 2, 1) == ["c"]
    assert place({"a": 8, "b": 3, "c": 1}, 2, 2) == ["b", "a"]
    assert place({"a": 1, "b": 1}, 2, 1) is None
    assert place({"a": 8}, 2, 2) is None


def test_how_many_engines_fit() -> None:
    assert most_engines({"a": 8, "b": 8}, 1, 1) == 16
    assert most_engines({"a": 8, "b": 8}, 3, 1) == 4
    assert most_engines({"a": 8, "b": 8}, 16, 1) == 0
    assert most_engines({"a": 8, "b": 8, "c": 8}, 8, 2) == 1
    assert most_engines({"a": 16, "b": 2}, 1, 2) == 2  # the small machine has a part of each
    assert most_engines({}, 1, 1) == 0


def test_room_is_made_on_the_machine_where_it_costs_least() -> None:
    free = {"a": 2, "b": 5}
    movable = {"a": [(2, "a1"), (4, "a2")], "b": [(1, "b1"), (2, "b2")]}
    assert make_room(free, movable, 8, 1) == (["b"], ["b1", "b2"])
    assert make_room(free, movable, 6, 1) == (["b"], ["b1"])
    assert make_room(free, movable, 6, 2) == (["b", "a"], ["b1", "a2"])  # four GPUs of a2 are enough
    assert make_room(free, movable, 9, 1) is None
    assert make_room(free, {}, 5, 1) == (["b"], [])  # what leaves makes room already
