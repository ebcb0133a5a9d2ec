"""A headless Chromium that tests drive by its DevTools protocol. `chromium` is Debian's package."""

import asyncio
import base64
import contextlib
import itertools
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium")
WHY_NOT = "there is no chromium on this machine (Debian: apt-get install chromium)"
_START_S = 60.0
_ANSWER_S = 60.0


class Page:
    """The only page of a browser. `faults`: what its console and its scripts complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.faults: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result. Raises RuntimeError."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        found = await asyncio.wait_for(answer, _ANSWER_S)
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']}")
        return found["result"]

    async def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript. Raises RuntimeError."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    async def until(self, script: str, limit_s: float = 60.0) -> Any:
        """Wait until an expression is true, and return its value. Raises TimeoutError."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            if value := await self.run(script):
                return value
            await asyncio.sleep(0.1)
        raise TimeoutError(f"{script}; the page: {await self.run('document.body.innerText')}")

    async def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the window's size, in CSS pixels, and the system's colours."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=width < 600,
            deviceScaleFactor=1,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def press(self, key: str) -> None:
        """Press a key: a character, or a name such as `Tab`."""
        code = {"Tab": 9, "Enter": 13, "ArrowDown": 40, "ArrowUp": 38}.get(key, 0)
        text = {"text": key} if len(key) == 1 else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def picture(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                self.faults.append(str(details.get("exception", details).get("description")))
            elif event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] in ("error", "warning"):
                    self.faults.append(f"{entry['text']} {entry.get('url', '')}")


@contextlib.asynccontextmanager
async def browsing(url: str) -> AsyncGenerator[Page, None]:
    """Open an address in a browser of its own. Raises RuntimeError if there is no browser."""
    if PROGRAM is None:
        raise RuntimeError(WHY_NOT)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [
                PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-dev-shm-usage", "--disable-background-networking",
                f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{port}/json/list") as answer,
            ):
                targets = await answer.json()
                address = next(one for one in targets if one["type"] == "page")
                async with session.ws_connect(
                    address["webSocketDebuggerUrl"], max_msg_size=1 << 28
                ) as socket:
                    page = Page(socket)
                    await page.open(url)
                    try:
                        yield page
                    finally:
                        await page.close()
        finally:
            process.kill()
            process.wait()


async def _port(path: Path) -> int:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(path.read_text().splitlines()[0])
        await asyncio.sleep(0.05)
    raise RuntimeError("the browser did not start")
