"""How many bytes of bodies a process holds, in all and for one project."""

import pytest

from service.api.body_bytes import DOWNLOAD_BYTES, SMALL_BYTES, UPLOAD_BYTES, BodyBytes
from service.errors import QuotaReached, Unavailable

LARGE = 4 * SMALL_BYTES


def test_a_project_has_a_share_and_others_have_theirs() -> None:
    counted = BodyBytes(4 * LARGE)
    mine = [counted.body("a") for _ in range(2)]
    for body in mine:
        body.add(LARGE)
    with pytest.raises(Unavailable):
        counted.body("a").add(LARGE)
    others = [counted.body(f"b{number}") for number in range(2)]
    for body in others:
        body.add(LARGE)
    with pytest.raises(Unavailable):
        counted.body("c").add(LARGE)
    for body in (*mine, *mine, others[0]):  # a second time changes nothing
        body.let_go()
    for project in ("a", "a", "c"):
        counted.body(project).add(LARGE)


def test_a_small_body_is_never_refused() -> None:
    counted = BodyBytes(0)
    counted.body("a").add(SMALL_BYTES)
    body = counted.body("a")
    body.add(SMALL_BYTES)
    with pytest.raises(Unavailable):
        body.add(1)
    body.let_go()


def test_an_answer_counts_where_its_body_did() -> None:
    counted = BodyBytes(4 * LARGE)
    body = counted.body("a")
    body.add(LARGE)
    body.let_go()
    body.add(2 * LARGE)  # what the project may hold
    with pytest.raises(Unavailable):
        counted.body("a").add(LARGE)
    counted.body("b").add(LARGE)
    body.let_go()
    counted.body("a").add(LARGE)


def test_transfers_count_what_they_hold() -> None:
    counted = BodyBytes(2 * (UPLOAD_BYTES + DOWNLOAD_BYTES))
    with counted.upload("a") as upload:
        for _ in range(10):
            upload.add(UPLOAD_BYTES)  # it is written as it comes
        with counted.download("a"):
            with pytest.raises(Unavailable), counted.download("a"):
                pass
            with counted.download("b"):
                pass
    for _ in range(2):  # all are let go
        with counted.upload("a") as upload, counted.download("a"):
            upload.add(UPLOAD_BYTES)


def test_uploads_that_come_share_what_is_left_of_a_quota() -> None:
    counted = BodyBytes()
    with counted.upload("a", 100) as first, counted.upload("a", 100) as second, counted.upload("b", 100) as third:
        first.wrote(60)
        third.wrote(100)
        with pytest.raises(QuotaReached, match="100 bytes"):
            second.wrote(60)
        second.let_go()
        first.wrote(40)
    with counted.upload("a", 100) as first, counted.upload("a") as second:
        second.wrote(1000)  # a part of an upload, whose size counts already
    with counted.upload("a", 100) as first:
        first.wrote(100)
