"""A page in a real browser. Tests that use it are skipped where there is no Chromium."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT = 20_000.0  # ms: on a busy machine a page takes its time


@dataclass
class Look:
    """A page, and what it complained of or asked of others."""

    page: Any
    url: str
    complaints: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    async def open(self) -> None:
        await self.page.goto(f"{self.url}/dashboard")
        await self.sees("#status", "live")

    async def sees(self, selector: str, text: str) -> None:
        from playwright.async_api import expect

        wanted = re.compile(re.escape(text))
        await expect(self.page.locator(selector).first).to_have_text(wanted, timeout=WAIT)

    async def until(self, script: str) -> None:
        """Waits until an expression holds in the page. Asked from outside: the page's policy
        forbids to evaluate text inside."""
        async with asyncio.timeout(WAIT / 1000):
            while not await self.page.evaluate(script):
                await self.page.wait_for_timeout(50)

    async def until_jobs(self, *names: str) -> None:
        """Waits until exactly these are listed, in any order."""
        listed = "[...document.querySelectorAll('tr.job button')].map((b) => b.textContent).sort()"
        await self.until(f"JSON.stringify({listed}) === JSON.stringify({sorted(names)})")

    def row(self, name: str) -> Any:
        return self.page.locator("tr.job", has_text=name)

    async def passes(self) -> int:
        """How many are in sight."""
        return int(await self.page.locator("canvas").get_attribute("data-passes"))


@asynccontextmanager
async def looking(url: str, **context: Any) -> AsyncIterator[Look]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    driver = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    async with driver.async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, headless=True, chromium_sandbox=False, args=FLAGS
        )
        try:
            page = await (await browser.new_context(**context)).new_page()
            look = Look(page, url)
            page.on("console", lambda m: m.type == "error" and look.complaints.append(m.text))
            page.on("pageerror", lambda error: look.complaints.append(str(error)))
            page.on("request", lambda r: r.url.startswith(url) or look.strangers.append(r.url))
            yield look
        finally:
            await browser.close()
