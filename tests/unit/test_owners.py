"""Another package in our folders is named before anything runs."""

import pytest

from service.cli import owners


def test_a_stranger_in_our_folders_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert owners.strangers() is None
    monkeypatch.setattr(owners, "packages_distributions", lambda: {"service": ["batchweave-server", "acme-service"]})
    assert "acme-service has files in service/" in (owners.strangers() or "")
