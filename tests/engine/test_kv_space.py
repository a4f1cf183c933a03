"""How much of the KV cache is free, with one pool and with two."""

from types import SimpleNamespace
from typing import Any

from engine_ext.plugin.scheduler.kv_space import KVSpace
from engine_ext.scan.decide import ANY_NUMBER


def space(window: int, **sizes: int) -> KVSpace:
    """The sizes that SGLang 0.5.17 reports for 6,000 tokens, of which the pool of windows has 1,200."""
    found: dict[str, Any] = {name: (lambda size=size: size) for name, size in sizes.items()}
    pools = SimpleNamespace(**found)
    return KVSpace(pools, pools, 6000, window)


def test_the_pool_of_windows_is_no_memory_in_use() -> None:
    idle = space(
        64,
        available_size=1200,
        full_available_size=6000,
        swa_available_size=1200,
        evictable_size=0,
        full_evictable_size=0,
        swa_evictable_size=0,
    )

    assert idle.free == idle.capacity
    assert idle.windows == 1200 // 64


def test_the_pool_of_windows_bounds_how_many_requests_run() -> None:
    full = space(
        64,
        available_size=26,
        full_available_size=4114,
        swa_available_size=26,
        evictable_size=633,
        full_evictable_size=633,
        swa_evictable_size=20,
    )

    assert full.free == 4114 + 633
    assert full.windows == 0


def test_one_pool_is_all_there_is() -> None:
    plain = space(0, available_size=100, evictable_size=50)

    assert (plain.free, plain.windows) == (150, ANY_NUMBER)


def test_where_all_layers_have_windows_old_prompts_count_as_free() -> None:
    """SGLang says of that one pool what it says of the smaller one of two, and calls nothing evictable beside."""
    sizes = {"swa_available_size": lambda: 100, "swa_evictable_size": lambda: 900, "full_evictable_size": lambda: 0}
    pools = SimpleNamespace(**sizes, full_available_size=lambda: 100)
    space = KVSpace(pools, pools, 1000, 64, is_all_windows=True)

    assert (space.free, space.windows) == (1000, ANY_NUMBER)
