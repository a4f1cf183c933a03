"""Fixtures of tests in a real browser."""

from collections.abc import AsyncGenerator

import pytest
from playwright.async_api import Page

from tests.dashboard.browser import browser_page
from tests.integration.conftest import harness, tokenizer, url

__all__ = ["harness", "tokenizer", "url"]


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """One database is enough: pages see the API's functions alone."""
    return sqlite_url


@pytest.fixture
async def page(url: str) -> AsyncGenerator[Page, None]:
    """Fails the test at its end when the console said anything or another host was asked."""
    async with browser_page(url) as (page, complaints):
        yield page
        assert complaints == []
