"""How many bytes of bodies a process holds, in all and for one project."""

import pytest

from service.api.held import SMALL_BYTES, Held
from service.errors import Unavailable

LARGE = 4 * SMALL_BYTES


def test_a_project_has_a_share_and_others_have_theirs() -> None:
    held = Held(4 * LARGE)
    mine = [held.body("a") for _ in range(2)]
    for body in mine:
        body.add(LARGE)
    with pytest.raises(Unavailable):
        held.body("a").add(LARGE)
    others = [held.body(f"b{number}") for number in range(2)]
    for body in others:
        body.add(LARGE)
    with pytest.raises(Unavailable):
        held.body("c").add(LARGE)
    for body in (*mine, *mine, others[0]):  # a second time changes nothing
        body.let_go()
    for project in ("a", "a", "c"):
        held.body(project).add(LARGE)


def test_a_small_body_is_never_refused() -> None:
    held = Held(0)
    held.body("a").add(SMALL_BYTES)
    body = held.body("a")
    body.add(SMALL_BYTES)
    with pytest.raises(Unavailable):
        body.add(1)
    body.let_go()
