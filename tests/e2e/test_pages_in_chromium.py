"""The pages in a real browser: what they show, keys, colours, and the width of a phone."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import openai
import pytest
from chromium import PROGRAM, WHY_NOT, Page, browsing
from server_process import ServerProcess, free_port, run_cli

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)]
ROWS = "document.querySelectorAll('[data-part=requests] .row').length"
SELECTED = "document.querySelector('.row[aria-selected=true]')?.dataset.id"
BACK = "getComputedStyle(document.body).backgroundColor"
TOO_WIDE = "document.documentElement.scrollWidth > innerWidth"
HIDDEN = (
    "document.documentElement.style.scrollBehavior = 'auto',"
    "document.getElementById('ID').scrollIntoView(),"
    "document.querySelector('#ID h2').getBoundingClientRect().top"
    " < document.querySelector('nav').getBoundingClientRect().bottom"
)
LIGHT, DARK = "rgb(246, 247, 249)", "rgb(20, 23, 28)"


@contextmanager
def replaying(record: Path) -> Iterator[str]:
    """Run `replay --dashboard`. The value is the page's address."""
    port = free_port()
    command = [sys.executable, "-m", "c2cserve.cli.main", "replay", str(record), "--dashboard"]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/dashboard"
    finally:
        process.kill()
        process.wait()


async def answering(url: str) -> str:
    """Wait for a server, and return its address."""
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            with suppress(aiohttp.ClientError):
                async with session.get(url):
                    return url
            await asyncio.sleep(0.1)
    raise TimeoutError(url)


async def check_looks(page: Page) -> None:
    """Check colours and widths: nothing but tables in their own boxes is wider than a phone."""
    for width, height in ((1280, 1000), (390, 844)):
        for dark in (False, True):
            await page.look(width, height, dark=dark)
            await page.until(f"{BACK} === '{DARK if dark else LIGHT}'")
            assert not await page.run(TOO_WIDE)
    await page.look(1280, 1000)


async def test_the_dashboard_of_a_server_under_load(tmp_path: Path) -> None:
    with ServerProcess(directory=tmp_path / "pool") as server:
        async with (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as client,
            browsing(f"{server.url}/dashboard") as page,
        ):
            await asyncio.gather(*(
                client.completions.create(model=model, prompt=f"{number}", max_tokens=100)
                for model in ("add", "sort", "reverse", "chat") for number in range(4)
            ))  # fmt: skip
            await page.until(f"{ROWS} >= 16")
            await page.until("document.getElementById('status').textContent === 'live'")
            cards = await page.run("document.querySelector('[data-part=slices]').innerText")
            assert "cpu0 (cpu)" in cards
            table = await page.run("document.querySelector('[data-part=models]').innerText")
            assert "adder-qwen" in table
            await check_looks(page)
            await check_keys(page)
            assert page.faults == []


async def check_keys(page: Page) -> None:
    await page.press("j")
    first = await page.until(SELECTED)
    await page.press("j")
    second = await page.until(SELECTED)
    assert first != second
    await page.press("k")
    assert await page.until(SELECTED) == first
    assert first in await page.run("document.getElementById('detail').innerText")
    for key, section in (("2", "models"), ("5", "requests")):
        await page.press(key)
        assert await page.run("document.activeElement.id") == section
        assert not await page.run(HIDDEN.replace("ID", section)), "the heading can be seen"
    for theme in ("dark", "light"):  # whatever the system says
        await page.press("t")
        await page.until(f"{BACK} === '{DARK if theme == 'dark' else LIGHT}'")
    await page.press(" ")
    assert await page.run("document.getElementById('status').textContent") == "paused"
    await page.press(" ")
    await page.until("document.getElementById('status').textContent === 'live'")
    await page.press("Tab")
    assert await page.run("document.activeElement.getAttribute('role')") == "option"
    before = await page.run(SELECTED)
    await page.press("ArrowDown")
    assert await page.until(SELECTED) != before


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulated") / "record.jsonl"
    done = run_cli(
        "simulate", "--catalog", "llama-3.1-8b*4", "--duration-s", "20", "--record", str(path)
    )
    assert done.returncode == 0, done.stderr
    return path


async def test_a_simulations_record(simulated: Path) -> None:
    with replaying(simulated) as url:
        async with browsing(await answering(url)) as page:
            await page.until(f"{ROWS} > 0")
            assert "gpu0" in await page.run("document.querySelector('[data-part=links]').innerText")
            await check_looks(page)
            await page.run(
                "(() => { const seek = document.getElementById('seek'); seek.value = 15;"
                " seek.dispatchEvent(new Event('change')); })()"
            )
            await page.until("document.getElementById('clock').textContent.startsWith('15')")
            await page.press(" ")
            assert await page.run("document.getElementById('status').textContent") == "paused"
            assert page.faults == []


async def test_the_page_of_the_api(server: ServerProcess) -> None:
    async with browsing(f"{server.url}/docs") as page:
        await page.until("document.querySelectorAll('section > details').length > 20")
        await check_looks(page)
        await page.press("/")
        for letter in "tokenize":
            await page.press(letter)
        shown = "document.querySelectorAll('section:not([hidden]) > details:not([hidden])').length"
        assert await page.run(shown) == 2
        await page.run("document.querySelector('section:not([hidden]) details summary').click()")
        body = await page.run("document.querySelector('section:not([hidden]) > details').innerText")
        assert "add_special_tokens" in body
        assert page.faults == []
