"""Debian's chromium, driven by Playwright, and what it complains about."""

import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from axe_playwright_python.base import AXE_SCRIPT  # pyright: ignore[reportMissingTypeStubs]
from playwright.async_api import Page, async_playwright

CHROMIUM = shutil.which("chromium")
IN_CI = bool(os.environ.get("CI"))
INSTALL = "chromium is not installed: apt-get install --no-install-recommends chromium"


@asynccontextmanager
async def browser_page(
    url: str, width: int = 1280, theme: Any = "light", scripts: bool = True
) -> AsyncGenerator[tuple[Page, list[str]], None]:
    """A page of a fresh browser, and what its console and its requests complained about."""
    assert CHROMIUM, INSTALL
    complaints: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        context = await browser.new_context(
            base_url=url,
            viewport={"width": width, "height": 900},
            color_scheme=theme,
            java_script_enabled=scripts,
            bypass_csp=False,
        )
        page = await context.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith((url, "data:")) else complaints.append(sent.url))
        try:
            yield page, complaints
        finally:
            await browser.close()


async def faults_of_access(page: Page) -> list[str]:
    """What axe-core finds serious or critical on the page."""
    await page.evaluate(AXE_SCRIPT)  # as a debugger does, since the page's own policy refuses scripts from elsewhere
    found: Any = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
