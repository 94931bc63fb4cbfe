"""The dashboard in a browser: seconds until its pages are interactive, what it reads, and the pictures of the docs.

python benchmarks/dashboard.py pages RUN         each page of a run, as first opened and opened again: seconds of the
                                                 browser from the request to an interactive page; CPU seconds of the
                                                 dashboard; bytes of the page
python benchmarks/dashboard.py pictures DIR      trains the quickstart for some steps and writes pictures of its pages
python benchmarks/dashboard.py watch RUN         serves a run and follows its page, as one reader does, until it is
                                                 stopped; then prints its refreshes and CPU seconds
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # before this directory, which has a `placement` of its own

from benchmarks.browser import executable, open_tab
from rollart.dashboard.pages import TABS
from rollart.dashboard.server import Dashboard, DashboardAccess
from rollart.launch.servers import serve_app
from rollart.ledger.reader import LedgerReader
from rollart.lifeline import stop_event

STEPS = 60
"""Of the quickstart whose pictures are taken."""


@contextlib.asynccontextmanager
async def serving(run: Path, *, running: bool = False) -> AsyncIterator[str]:
    board = Dashboard(lambda: [run], lambda _: running, access=DashboardAccess())
    async with serve_app(board.app(), host="127.0.0.1", port=0) as url:
        yield f"{url}/runs/{run.resolve().name}"


async def measure_pages(run: Path) -> None:
    print(f"{'page':28} {'first s':>8} {'again s':>8} {'cpu s':>7} {'kB':>7}")
    async with serving(run) as url, open_tab() as tab:
        paths = [*(f"/{name}" if name != TABS[0] else "" for name in TABS), "/trajectories?sort=usd&offset=50000"]
        for path in paths:
            began = time.process_time()
            first = await tab.open(url + path)
            cpu_s = time.process_time() - began
            again = await tab.open(url + path)
            size = len(await tab.run("document.documentElement.outerHTML")) / 1e3
            print(f"{path or '/':28} {first:8.2f} {again:8.2f} {cpu_s:7.2f} {size:7.0f}", flush=True)


async def take_pictures(directory: Path, run: Path | None) -> None:
    if executable() is None:
        print("no pictures: there is no Chromium here (apt-get install chromium)", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as home:
        if run is None:
            command = [sys.executable, "-m", "rollart.cli.main", "launch", f"steps={STEPS}", "--name", "quickstart-1"]
            subprocess.run([*command, "--runs-dir", home], check=True)
            run = Path(home) / "quickstart-1"
        with LedgerReader(run) as reader:
            spans = list(reader.trajectory_spans(STEPS // 2))
        t0, t1 = min(span.t0 for span in spans), max(span.t1 for span in spans)
        stretch = f"/timeline?t0={t0 - 0.2 * (t1 - t0):.3f}&t1={t1:.3f}"
        async with serving(run) as url, open_tab(1280, 900) as tab:
            for name, path in (("dashboard", ""), ("dashboard_timeline", stretch)):
                await tab.open(url + path)
                await asyncio.sleep(0.3)  # the charts are painted
                await tab.picture(directory / f"{name}.png")


async def watch(run: Path) -> None:
    """One reader, whose page is fetched again at each event."""
    refreshes = 0
    stopped = stop_event()
    async with serving(run, running=True) as url, aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:

        async def read() -> None:
            nonlocal refreshes
            while True:
                async with session.get(url) as answer:
                    text = await answer.text()
                refreshes += 1
                changes = re.findall(r'data-changes="([^"]+)"', text)[0].replace("&amp;", "&")
                async with session.get(url.partition("/runs/")[0] + changes) as stream:
                    async for line in stream.content:
                        if line.startswith(b"data:"):
                            break

        reading = group.create_task(read())
        print("ready", flush=True)
        await stopped.wait()
        reading.cancel()
    print(json.dumps({"refreshes": refreshes, "dashboard_cpu_s": time.process_time()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("pages", "pictures", "watch"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--run", type=Path, help="for pictures: this run in place of a new one")
    arguments = parser.parse_args()
    match arguments.case:
        case "pages":
            asyncio.run(measure_pages(arguments.path))
        case "pictures":
            asyncio.run(take_pictures(arguments.path, arguments.run))
        case "watch":
            asyncio.run(watch(arguments.path))


if __name__ == "__main__":
    main()
