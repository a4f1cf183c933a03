"""`make screenshots`: each page of a service that really ran batches, wide and narrow, light and dark."""

import asyncio
import sys
import tempfile
from pathlib import Path

from service.demo.prompts import requests
from tests.acceptance.service import Up
from tests.acceptance.test_up import MODEL, long_lines
from tests.dashboard.browser import CHROMIUM, INSTALL, browser_page

FOLDER = Path("docs/screenshots")
SETTLE_S = 2.5  # for charts, and a first tick


async def take(up: Up, pages: dict[str, str]) -> None:
    for width in (390, 1920):
        for theme in ("light", "dark"):
            async with browser_page(up.url, width, theme) as (page, complaints):
                for name, path in pages.items():
                    await page.goto(path)
                    await asyncio.sleep(SETTLE_S)
                    target = FOLDER / f"{name}-{width}-{theme}.png"
                    await page.screenshot(path=target, full_page=width == 390)
                    print(target)
                assert complaints == [], complaints


def main() -> None:
    if CHROMIUM is None:
        sys.exit(INSTALL)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="batchweave-screenshots-") as name:
        up = Up.on(Path(name) / "data")
        up.start()
        try:
            up.until_engine()
            done = [up.submit(lines, endpoint) for endpoint, lines in requests(MODEL).items()]
            for batch_id in done:
                up.wait(batch_id)
            bad = up.submit(b'{"custom_id": "a"}\n{"custom_id": "b", "method": "GET", "url": "/v1/x", "body": {}}\n')
            up.wait(bad)
            running = up.submit(long_lines("long", 1500))
            up.until(lambda: up.done(running) >= 300, "answers")
            pages = {
                "overview": "/dashboard",
                "batches": "/dashboard/batches",
                "running": f"/dashboard/batches/{running}",
                "completed": f"/dashboard/batches/{done[0]}",
                "errors": f"/dashboard/batches/{bad}",
                "new": "/dashboard/new",
                "files": "/dashboard/files",
                "workers": "/dashboard/workers",
                "projects": "/dashboard/projects",
                "audit": "/dashboard/audit",
                "settings": "/dashboard/settings",
            }
            asyncio.run(take(up, pages))
        finally:
            up.stop()


if __name__ == "__main__":
    main()
