"""The page of settings is what the settings say."""

from pathlib import Path

from service.cli.settings_page import page
from service.dashboard.settings_list import HEADINGS, grouped
from service.settings import Settings

PAGE = Path(__file__).parents[2] / "docs/settings.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "make settings"


def test_every_setting_is_described() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name


def test_headings_are_in_the_order_of_the_settings() -> None:
    groups = grouped()
    assert [name for names in groups.values() for name in names] == list(Settings.model_fields)
    assert all(len(names) > 1 for names in groups.values())
    assert "" not in groups
    assert len(groups) == len(HEADINGS)
