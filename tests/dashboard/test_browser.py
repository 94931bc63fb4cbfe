"""The dashboard in a real Chromium, during a real run: its pages show the ledger's figures, and follow the run."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.browser import Tab, executable, open_tab
from rollart.dashboard.pages import TABS
from rollart.ledger.reader import LedgerReader
from rollart.report.cost import cost
from rollart.report.rows import RunRows, collect
from rollart.report.tables import for_people, rows_for_people
from tests.dashboard.made import EVIL, write_run
from tests.e2e.harness import BATCH, ROLLART, STEPS, Home, environment, held, tiny

pytestmark = [
    pytest.mark.slow,  # a browser and a run are processes
    pytest.mark.skipif(executable() is None, reason="no Chromium here (apt-get install chromium)"),
]

WIDTHS = (1280, 420)

CELLS = "[...document.querySelectorAll('main td')].map(cell => cell.textContent)"

FIGURES = """Object.fromEntries([...document.querySelectorAll('.figures div')].map(
  each => [each.querySelector('dt').textContent, each.querySelector('dd').textContent]))"""


@contextmanager
def dashboard(runs: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [*ROLLART, "dashboard", "--json", "--runs", str(runs)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["url"].rstrip("/")
    finally:
        process.kill()
        process.communicate()


def rows_of(directory: Path) -> RunRows:
    with LedgerReader(directory) as reader:
        return collect(reader, directory.name)


def cells_of_cost(directory: Path) -> list[str]:
    tables = [for_people(table) for table in cost(rows_of(directory)).tables if table.people]
    return [cell for table in tables for row in rows_for_people(table) for cell in row]


def test_pages_of_a_run_while_it_goes_on_and_after(tmp_path: Path) -> None:
    home = Home(tmp_path)
    try:
        run = home.launch(tiny(**held(home)))
        run.until_step(STEPS - 1)
        write_run(home.directory.parent / "evil")
        with dashboard(home.directory.parent) as (process, url):
            asyncio.run(_read(home, url))
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            assert (process.returncode, out, err) == (130, "", "")
        run.finished()
    finally:
        home.close()


async def _read(home: Home, url: str) -> None:
    page = f"{url}/runs/{home.directory.name}"
    async with open_tab() as tab:
        await _every_page(tab, url, page)
        await tab.open(page)
        before = await tab.run(FIGURES)
        facts = rows_of(home.directory).facts
        assert before["step"] == f"{facts.step} of {STEPS}"
        assert before["trained trajectories"] == str(facts.trained_samples) == str((STEPS - 1) * BATCH)
        assert await tab.run("document.querySelector('.state').textContent") == "running"
        await tab.run("document.querySelector('.plot').mark = 'kept'")
        home.open()
        await tab.until("document.querySelector('.state').textContent === 'finished'")
        assert (await tab.run(FIGURES))["trained trajectories"] == str(STEPS * BATCH)
        assert await tab.run("document.querySelector('.plot').mark") == "kept"  # a chart keeps its zoom
        await tab.open(f"{page}/cost")
        assert await tab.run(CELLS) == cells_of_cost(home.directory)
        await _drag(tab, page)
        await tab.open(f"{url}/runs/evil/trajectories/lake-0.1")
        assert EVIL in await tab.run(
            "document.querySelector('.message ~ .message, .message').parentElement.parentElement.textContent"
        )
        assert await tab.run("[document.title, document.querySelectorAll('main img, main script').length]") == [
            "lake-0.1 · rollart",
            0,
        ]
        assert tab.errors == []


async def _every_page(tab: Tab, url: str, page: str) -> None:
    """Each page at both widths: nothing fails, nothing sticks out, every chart is drawn."""
    paths = [f"{url}/", *(page if tab == TABS[0] else f"{page}/{tab}" for tab in TABS)]
    for width in WIDTHS:
        await tab.resize(width, 900)
        for path in [*paths, f"{url}/compare?run={page.rpartition('/')[2]}&run=evil"]:
            await tab.open(path)
            assert tab.errors == [], path
            assert await tab.run("document.documentElement.scrollWidth") <= width, path
            drawn = "[...document.querySelectorAll('.plot')].filter(plot => !plot.querySelector('canvas')).length"
            assert await tab.run(drawn) == 0, path
    await tab.resize(WIDTHS[0], 900)


async def _drag(tab: Tab, page: str) -> None:
    """A stretch of the timeline is dragged over, until single trajectories show; one of them is opened."""
    await tab.open(f"{page}/timeline")
    rect = "document.querySelector('.zoom svg').getBoundingClientRect()"
    box = f"(({{x, y, width, height}}) => [x, y, width, height])({rect})"
    x, y, width, height = await tab.run(box)
    await tab.drag(x + 0.5 * width, x + 0.9 * width, y + height / 2)
    await tab.until(
        "location.search.includes('t0=') && document.body.dataset.ready && document.querySelector('.links a')"
    )
    name = await tab.run("document.querySelector('.links a').textContent")
    await tab.run("document.querySelector('.links a').click()")
    await tab.until(f"document.title.startsWith({json.dumps(name)}) && document.querySelector('.message')")
