"""What pages say of a batch: its headline, and how it stands against its deadline."""

from typing import Any

import pytest

from service.api.shapes import BatchObject
from service.dashboard.render import short
from service.dashboard.schedule import own
from service.dashboard.shown import Shown, clock_time
from service.objects.plan_picture import Box, PlanPicture

NOW = 1_700_000_000.0  # 2023-11-14, 22:13 UTC
ABSENT = (
    *(
        "retry_of",
        "retry_outcomes",
        "accept",
        "max_tokens",
        "queue_position",
        "waiting_for",
        "preview",
        "expected_output_tokens",
        "expected_gpu_seconds",
    ),
    *("expected_cost", "earliest_at", "expected_at", "latest_at", "late_because"),
    *("early_output_file_id", "early_error_file_id"),
)
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
ABOUT: dict[str, Any] = dict.fromkeys(ABSENT) | {
    "output_order": "any",
    "outcomes": {"ok": 411, "cut_off": 0, "looped": 0, "invalid": 0, "refused": 0, "failed": 0, "not_accepted": 0},
    "outcome_warnings": [],
    "held": False,
    "prompt_tokens": 0,
    "unknown_parameters": [],
    "unknown_fields": [],
    "failures": [],
}


def batch(state: str, *, about: dict[str, Any] | None = None, counts: tuple[int, int] = (411, 0), **more: Any) -> Shown:
    """A batch of 2,000 requests that was created 100 s ago and is due in an hour."""
    statuses = {"waiting": "in_progress", "held": "in_progress", "running": "in_progress"}
    times = dict.fromkeys(f"{name}_at" for name in TIMES)
    told = {
        "id": "batch_x",
        "endpoint": "/v1/completions",
        "model": "m",
        "errors": None,
        "input_file_id": "file-x",
        "completion_window": "24h",
        "status": statuses.get(state, state),
        "output_file_id": None,
        "error_file_id": None,
        "created_at": int(NOW) - 100,
        "expires_at": int(NOW) + 3600,
        "request_counts": {"total": 2000, "completed": counts[0], "failed": counts[1]},
        "usage": None,
        "metadata": None,
        "batchweave": ABOUT | (about or {}),
    }
    return Shown(BatchObject.model_validate(times | told | more), "name", state, None, None)


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (batch("running", about={"expected_at": int(NOW) + 360}), "Running, 411 of 2,000, done about 22:19 UTC"),
        (batch("running"), "Running, 411 of 2,000"),
        (batch("waiting", about={"waiting_for": "planning"}, counts=(0, 0)), "Waiting for planning"),
        (batch("held", counts=(0, 0)), "Held: it runs once you start it"),
        (
            batch("completed", counts=(1988, 12), completed_at=int(NOW)),
            "Completed in 1 min 40 s: 1,988 answers, 12 failed",
        ),
        (
            batch("failed", errors={"data": [{"code": "c", "line": 1, "message": "m", "param": None}]}),
            "Failed: the file has 1 error, and nothing ran",
        ),
        (
            batch("failed", errors={"data": [{"code": "model_not_served", "line": 1, "message": "m", "param": None}]}),
            "Failed: no worker serves its model, and nothing ran",
        ),
        (
            batch(
                "expired",
                counts=(411, 0),
                about={
                    "failures": [
                        {"status_code": None, "code": "batch_expired", "message": "m", "count": 1589, "custom_ids": []}
                    ]
                },
            ),
            "Expired with 411 of 2,000 answered",
        ),
    ],
)
def test_one_sentence_says_where_a_batch_stands(shown: Shown, said: str) -> None:
    assert shown.headline(NOW) == said


def test_a_deadline_is_good_tight_or_late() -> None:
    def against(expected_s: int) -> str:
        found = batch("running", about={"expected_at": int(NOW) + expected_s}).slack(NOW)
        assert found
        return found[0]

    assert [against(each) for each in (60, 3000, 4000)] == ["good", "tight", "late"]
    assert batch("held", about={"held": True}).slack(NOW) is None
    assert batch("completed").slack(NOW) is None


def test_times_and_ids_are_short() -> None:
    assert clock_time(NOW + 360, NOW) == "22:19 UTC"
    assert clock_time(NOW + 24 * 3600, NOW) == "15 Nov 22:13 UTC"
    assert short("batch_" + "0123456789abcdef" * 2) == "batch_012345…"
    assert short("file-" + "0123456789abcdef" * 2) == "file-012345…"
    assert short("batch_x") == "batch_x"


def test_a_project_sees_of_a_tree_what_its_own_requests_are_in() -> None:
    shared = Box(0, 0.75, 0, 9, 0, 40, "said by both", ((0, 1), (1, 2)))
    theirs, mine = Box(0, 0.5, 9, 12, 0, 50, "a secret", ((1, 2),)), Box(0.75, 0.25, 0, 9, 0, 7, "mine", ((0, 1),))
    picture = PlanPicture(4, 12, [shared, theirs, mine], [], ["proj_a", "proj_b"])
    seen = own(picture, "proj_a")
    assert [(box.text, box.width, box.output_tokens) for box in seen] == [("said by both", 0.25, 0), ("mine", 0.25, 7)]
    assert [box.text for box in own(picture, "proj_b")] == ["said by botha secret"]
    assert own(picture, "proj_c") == []


def test_a_guess_at_a_prefix_looks_the_same_whether_others_share_it_or_not() -> None:
    """Two requests of a project part at depth 20; another project shares 6 tokens with both, and more with one."""
    ours, theirs = ((0, 2),), ((0, 2), (1, 2))
    first, second = ((0, 1),), ((0, 1),)
    apart = [Box(0, 1, 0, 20, 0, 5, "ab", ours), Box(0, 0.5, 20, 30, 0, 5, "c", first)]
    apart.append(Box(0.5, 0.5, 20, 25, 0, 5, "d", second))
    alone = PlanPicture(2, 30, apart, [], ["proj_a"])
    shared = [
        Box(0, 1, 0, 6, 1.0, 9, "a", theirs),
        Box(0, 0.75, 6, 20, 1.0, 9, "b", ((0, 2), (1, 1))),
        Box(0, 0.5, 20, 24, 1.0, 9, "c", ((0, 1), (1, 1))),
        Box(0, 0.25, 24, 30, 0, 5, "", first),
        Box(0.25, 0.25, 24, 99, 0, 9, "theirs", ((1, 1),)),
        Box(0.5, 0.25, 20, 25, 0, 5, "d", second),
        Box(0.75, 0.25, 6, 99, 0, 9, "theirs", ((1, 1),)),
    ]
    beside = PlanPicture(4, 99, shared, [], ["proj_a", "proj_b"])

    def looks(picture: PlanPicture) -> list[tuple[int, int, float, str]]:
        return [(box.begin, box.end, box.width * picture.requests, box.text) for box in own(picture, "proj_a")]

    assert looks(beside) == looks(alone) == [(0, 20, 2, "ab"), (20, 30, 1, "c"), (20, 25, 1, "d")]


@pytest.mark.parametrize(
    ("accept", "words"),
    [
        (None, ""),
        ({"schema": True, "retries": 1}, "the whole JSON that was asked for; 1 retry"),
        (
            {"finish": "stop", "continue": 1500, "thinking_tokens": 0},
            "not cut off, looped or refused; 1,500 more tokens; thoughts of 0 tokens",
        ),
        ({"loops": "stop"}, "loops are stopped"),
    ],
)
def test_a_batch_says_what_it_accepts(accept: dict[str, Any] | None, words: str) -> None:
    assert batch("running", about={"accept": accept}).accepts == words
