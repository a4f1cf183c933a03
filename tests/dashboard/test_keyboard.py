"""The dashboard by keyboard alone."""

import pytest
from playwright.async_api import Page, expect

from tests.dashboard.browser import CHROMIUM, IN_CI, INSTALL
from tests.integration.harness import Harness, jsonl, line

pytestmark = pytest.mark.skipif(CHROMIUM is None and not IN_CI, reason=INSTALL)

# What has the focus, by its place among all that can have it, and whether it looks so.
ALL = """[...document.querySelectorAll('a[href], button:enabled, input:not([type=hidden]), select, textarea')]
  .filter((each) => each.checkVisibility())"""
REACHED = f"""() => {{
  const all = {ALL};
  const here = document.activeElement;
  const style = getComputedStyle(here);
  return all.includes(here) && {{
    name: `${{all.indexOf(here)}} ${{here.textContent || here.name}}`,
    seen: style.outlineStyle !== 'none' && here.getClientRects().length > 0,
  }};
}}"""


@pytest.mark.parametrize("path", ["", "/batches", "/new", "/projects"])
@pytest.mark.slow
async def test_everything_is_reached_by_keyboard(page: Page, harness: Harness, path: str) -> None:
    await harness.submit(jsonl([line(1)]))
    await page.goto(f"/dashboard{path}")
    wanted = await page.evaluate(f"({ALL}).length")
    reached: set[str] = set()
    for _ in range(4 * wanted):  # a date has fields of its own
        await page.keyboard.press("Tab")
        found = await page.evaluate(REACHED)
        if found:
            assert found["seen"], f"nothing shows that {found['name']} has the focus"
            reached.add(found["name"])
    assert len(reached) == wanted


async def test_the_keyboard_skips_to_the_content_and_signs_nobody_out(page: Page) -> None:
    await page.goto("/dashboard/batches")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.name") == "text"
    assert await page.evaluate("document.activeElement.closest('main') !== null")


async def test_the_keyboard_goes_everywhere(page: Page, harness: Harness) -> None:
    for _ in range(2):
        await harness.submit(jsonl([line(1)]))
    await page.goto("/dashboard")
    await page.keyboard.type("gb")
    await page.wait_for_url("**/dashboard/batches")
    here = "document.activeElement.closest('tbody tr')?.rowIndex"
    for key, row in (("j", 1), ("j", 2), ("j", 2), ("k", 1)):
        await page.keyboard.type(key)
        await page.wait_for_function(f"{here} === {row}")
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/dashboard/batches/batch_*")
    await page.keyboard.type("?")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_be_hidden()
    await page.keyboard.type("/")
    await expect(page.get_by_role("searchbox")).to_be_focused()
    await page.keyboard.type("g b?n")  # a text now
    await expect(page.get_by_role("dialog")).to_be_hidden()
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/dashboard/batches?text=g+b%3Fn")


async def test_a_key_counts_as_soon_as_the_list_of_keys_is_closed(page: Page) -> None:
    """The browser takes the focus out of a closed dialog only with the next frame, which a busy machine draws late."""
    await page.goto("/dashboard")
    await page.keyboard.type("?")
    await expect(page.get_by_role("dialog")).to_be_visible()
    focused = await page.evaluate("""() => {
        document.getElementById("keys").close();
        document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: "/", bubbles: true}));
        return document.activeElement.type;
    }""")
    assert focused == "search"
    await expect(page.get_by_role("searchbox")).to_be_focused()


async def test_single_keys_can_be_switched_off(page: Page) -> None:
    """As WCAG 2.1.4 asks: what speech input types must not move the page."""
    dialog = page.get_by_role("dialog")
    await page.goto("/dashboard")
    await page.get_by_role("button", name="Keyboard shortcuts").click()
    await dialog.get_by_label("Use these single-key shortcuts").uncheck()
    await dialog.get_by_role("button", name="Close").click()
    await page.reload()
    await page.keyboard.type("?/gbjn")
    await expect(dialog).to_be_hidden()
    await page.wait_for_timeout(500)  # for a navigation that must not come
    assert page.url.endswith("/dashboard")
    await expect(page.get_by_role("searchbox")).not_to_be_focused()
    await page.get_by_role("button", name="Keyboard shortcuts").click()
    await dialog.get_by_label("Use these single-key shortcuts").check()
    await page.keyboard.press("Escape")
    await page.keyboard.type("gb")
    await page.wait_for_url("**/dashboard/batches")
