"""What a batch waits for and why it is late, where online requests share its engines."""

import pytest

from service.db.tables import Batch
from service.estimates.serving import Serving
from service.estimates.standing import Estimate, late_because, waiting_for

NOW = 1000.0


@pytest.mark.parametrize(
    ("expires_at", "online_share", "is_said"),
    [
        (1100, 0.5, False),  # it is in time
        (1080, 0.5, True),  # alone it would end at 1050
        (1040, 0.5, False),  # it would be late even alone
        (1080, 0.0, False),
    ],
)
def test_a_batch_is_late_because_of_online_requests_only_if_it_would_be_in_time_alone(
    expires_at: int, online_share: float, is_said: bool
) -> None:
    batch, model = Batch(held=False, expires_at=expires_at), Serving(alive=1, online_share=online_share)
    said = late_because(batch, Estimate(expected_at=1100), model, NOW)
    assert said == ("online requests, which take 50% of the engines' time" if is_said else None)


def test_a_batch_whose_end_is_unknown_is_not_late() -> None:
    assert late_because(Batch(held=False, expires_at=1), Estimate(), Serving(alive=1, online_share=1.0), NOW) is None


@pytest.mark.parametrize(("online_share", "more"), [(0.9, " beside online requests, which take 90% of"), (0.1, "")])
def test_what_waits_for_room_says_who_has_it(online_share: float, more: str) -> None:
    batch = Batch(held=False, planned=8, model="m")
    said = waiting_for(batch, False, 0, Serving(alive=1, online_share=online_share))
    assert said is not None
    assert said.removesuffix(" the engines' time") == f"room in an engine{more}"
