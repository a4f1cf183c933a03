"""`make screenshots`: each page of a service that really ran batches, wide and narrow, light and dark."""

import asyncio
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from service.db.tables import DEFAULT_PROJECT
from service.demo.prompts import CHAT, requests
from tests.acceptance.service import Up
from tests.acceptance.test_up import MODEL
from tests.dashboard.browser import CHROMIUM, INSTALL, browser_page

FOLDER = Path("results/screenshots")  # the four of README.md are copied to docs/screenshots by hand
COPIES = 25
NAMES = ("Support tickets, sample", "Stories to continue")
SETTLE_S = 2.5  # for charts, and a first tick


async def take(up: Up, pages: dict[str, str]) -> None:
    for width in (390, 1440, 1920):
        for theme in ("light", "dark"):
            async with browser_page(up.url, width, theme) as (page, complaints):
                for name, path in pages.items():
                    await page.goto(path)
                    await asyncio.sleep(SETTLE_S)
                    target = FOLDER / f"{name}-{width}-{theme}.png"
                    await page.screenshot(path=target, full_page=width < 1920)
                    print(target)
                assert complaints == [], complaints


def much_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The demo's requests many times over, each a little other, with answers of many lengths."""
    rng, found = random.Random(1), list[dict[str, Any]]()
    for n in range(COPIES):
        for line in lines:
            *before, last = line["body"]["messages"]
            messages = [*before, {**last, "content": f"{last['content']} ({n})"}]
            body = {**line["body"], "messages": messages, "max_tokens": rng.randint(5, 300), "ignore_eos": True}
            found.append({**line, "custom_id": f"{line['custom_id']}-{n}", "body": body})
    return found


def main() -> None:
    if CHROMIUM is None:
        sys.exit(INSTALL)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="batchweave-screenshots-") as name:
        up = Up.on(Path(name) / "data")
        up.start()
        try:
            up.until_engine()
            done = [
                up.submit(lines, endpoint, metadata={"name": name})
                for name, (endpoint, lines) in zip(NAMES, requests(MODEL).items(), strict=True)
            ]
            for batch_id in done:
                up.wait(batch_id)
            bad = up.submit(b'{"custom_id": "a"}\n{"custom_id": "b", "method": "GET", "url": "/v1/x", "body": {}}\n')
            up.wait(bad)
            held = up.submit(requests(MODEL)[CHAT], extra_body={"batchweave": {"hold": True}})
            running = up.submit(much_of(requests(MODEL)[CHAT]), metadata={"name": "Ticket labels, November"})
            up.until(lambda: up.done(running) >= 600, "answers")
            moving = {
                "running": f"/dashboard/batches/{running}",
                "overview": "/dashboard",
                "batches": "/dashboard/batches",
                "schedule": f"/dashboard/batches/{running}/schedule",
            }
            asyncio.run(take(up, moving))
            pages = {
                "completed": f"/dashboard/batches/{done[0]}",
                "errors": f"/dashboard/batches/{bad}/errors",
                "held": f"/dashboard/batches/{held}",
                "new": "/dashboard/new",
                "files": "/dashboard/files",
                "workers": "/dashboard/workers",
                "projects": "/dashboard/projects",
                "project": f"/dashboard/projects/{DEFAULT_PROJECT}",
                "audit": "/dashboard/audit",
                "settings": "/dashboard/settings",
            }
            asyncio.run(take(up, pages))
        finally:
            up.stop()


if __name__ == "__main__":
    main()
