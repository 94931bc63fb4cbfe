"""The dashboard over HTTP, without a browser: its pages, who may read them, and the figures on them."""

from __future__ import annotations

import asyncio
import html
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest

from rollart.dashboard import readings, server
from rollart.dashboard.pages import PAGE_ROWS, TABS
from rollart.dashboard.server import Dashboard, DashboardAccess
from rollart.launch.servers import serve_app
from rollart.ledger.reader import LedgerReader
from rollart.report.cost import cost
from rollart.report.render import render
from rollart.report.rows import collect
from rollart.report.tables import for_people, rows_for_people
from rollart.report.trajectories.listing import listing
from tests.dashboard.made import EVIL, write_run

TOKEN = "a-token"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "mine")


class Reader:
    """A client of a dashboard."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def get(self, path: str, **more: object) -> tuple[int, str, dict[str, str]]:
        async with self.session.get(self.url + path, **more) as answer:  # type: ignore[arg-type]
            return answer.status, await answer.text(), dict(answer.headers)

    async def page(self, path: str) -> str:
        """A page that must be there: well-formed, and without anything inline."""
        status, text, headers = await self.get(path)
        assert status == 200, text
        root = ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert [e.text for e in root.iter("script") if e.text] == []
        assert [e for e in root.iter() for name in e.attrib if name == "style" or name.startswith("on")] == []
        return text


@asynccontextmanager
async def serving(
    *runs: Path, token: str = "", single: bool = False, running: Callable[[Path], bool] = lambda _: False
) -> AsyncIterator[Reader]:
    board = Dashboard(lambda: runs, running, access=DashboardAccess(token), single=single)
    async with (
        serve_app(board.app(), host="127.0.0.1", port=0) as url,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
    ):
        yield Reader(session, url)


def ask(use: Callable[[Reader], Awaitable[None]], *runs: Path, token: str = "", single: bool = False) -> None:
    async def main() -> None:
        async with serving(*runs, token=token, single=single) as reader:
            await use(reader)

    asyncio.run(main())


def test_every_page_is_whole_and_what_a_model_wrote_stays_text(run: Path) -> None:
    async def use(reader: Reader) -> None:
        for path in ("/", *(f"/runs/mine/{tab}" for tab in TABS), "/compare?run=mine", "/runs/mine/timeline?t0=0&t1=2"):
            await reader.page(path)
        for path in ("/runs/mine", "/runs/mine/trajectories/lake-0.1"):
            text = await reader.page(path)
            assert "&lt;script&gt;document.title=" in text
            assert EVIL not in text

    ask(use, run)


def test_figures_are_those_of_the_reports(run: Path) -> None:
    async def use(reader: Reader) -> None:
        with LedgerReader(run) as ledger:
            rows = collect(ledger, "mine")
            trajectories = listing(ledger, "mine", domain=None, outcome=None, sort="tokens", most=None)
        report = cost(rows)
        _, text, _ = await reader.get("/runs/mine/reports/cost.json")
        assert json.loads(text) == json.loads(render(report, "json"))
        (usd,) = (row[2] for row in report.tables[0].rows if row[0] == "total")
        assert usd == pytest.approx(10.0, abs=0.01)
        overview = await reader.page("/runs/mine")
        assert re.search(r"billed so far</dt><dd>\$10\.00<", overview)
        assert "they wait for environments, rewards or admission" in overview  # its engine is idle for 8 of 10 s
        shown = await reader.page("/runs/mine/cost")
        for table in report.tables:
            if table.people:
                cells = [cell for row in rows_for_people(for_people(table)) for cell in row]
                assert [cell for cell in cells if f">{html.escape(cell)}<" not in shown] == []
        table = trajectories.tables[0]
        shown = await reader.page("/runs/mine/trajectories?sort=tokens")
        order = re.findall(r'href="/runs/mine/trajectories/([^"]+)"', shown)
        assert order == [row[0] for row in table.rows]
        plots = {p["title"]: p for p in plots_of(overview)}
        points = [row for row in curve_points(rows) if row[0] == "sampled"]
        (sampled,) = plots["Success: lake"]["series"]
        assert (sampled["values"], sampled["low"], sampled["high"]) == tuple([p[n] for p in points] for n in (1, 2, 3))

    ask(use, run)


def plots_of(page: str) -> list[dict[str, object]]:
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    drawn = [e for e in root.iter("div") if "data-plot" in e.attrib]
    return [{"title": e.attrib["aria-label"], **json.loads(e.attrib["data-plot"])} for e in drawn]


def curve_points(rows: object) -> list[tuple[str, float, float, float]]:
    from rollart.report.curve import curve

    (points,) = (t for t in curve(rows).tables if t.name == "points")  # type: ignore[arg-type]
    at = [c.name for c in points.columns]
    names = {"training": "sampled", "evaluation": "held out"}
    return [
        (names[str(r[at.index("kind")])], *(float(r[at.index(c)] or 0) for c in ("success", "low", "high")))  # type: ignore[misc]
        for r in points.rows
    ]


def test_trajectories_are_paged_filtered_and_sorted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", steps=30)

    async def use(reader: Reader) -> None:
        found: list[str] = []
        for offset in (0, PAGE_ROWS):
            text = await reader.page(f"/runs/long/trajectories?sort=end&offset={offset}")
            found += re.findall(r'href="/runs/long/trajectories/([^"]+)"', text)
        assert len(found) == len(set(found)) == 61
        text = await reader.page("/runs/long/trajectories?outcome=stale&domain=lake")
        assert re.findall(r"trajectories/([^\"?]+)\"", text) == ["lake-99.0"]
        assert "1 to 1 of 1 trajectories" in text
        for wrong in ("sort=size", "offset=-1", "offset=9999999999999"):
            status, text, _ = await reader.get(f"/runs/long/trajectories?{wrong}")
            assert (status, "rule: " in text) == (400, True)

    ask(use, run)


def test_the_timeline_zooms_to_single_turns(run: Path) -> None:
    async def use(reader: Reader) -> None:
        whole = await reader.page("/runs/mine/timeline")
        assert "lake-0.0" not in whole
        zoomed = await reader.page("/runs/mine/timeline?t0=0.5&t1=2")
        assert re.search(r"lake-0\.1, 1\.\d+ s to 1\.\d+ s\n[^<]*the turn after it", zoomed)
        for wrong in ("t0=2&t1=1", "t0=x&t1=2", "t0=1", "t0=0&t1=inf"):
            status, text, _ = await reader.get(f"/runs/mine/timeline?{wrong}")
            assert (status, "rule: " in text) == (400, True)

    ask(use, run)


def test_a_token_is_needed_where_there_is_one(run: Path) -> None:
    async def use(reader: Reader) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "rollart-dashboard-1=x"}):
            for path in ("/", "/static/dashboard.js", "/changes?run=mine", "/?token=wrong", "/runs/gone"):
                status, text, answered = await reader.get(path, headers=headers)
                assert status == 401
                assert "mine" not in text
                assert "Content-Security-Policy" in answered
        status, _, _ = await reader.get("/", headers={"Authorization": f"Bearer {TOKEN}"})
        assert status == 200
        async with reader.session.get(f"{reader.url}/runs/mine?token={TOKEN}&x=1", allow_redirects=False) as answer:
            assert answer.status == 303
            assert answer.headers["Location"] == "/runs/mine?x=1"
            assert {"HttpOnly", "SameSite=Strict"} <= set(answer.headers["Set-Cookie"].split("; "))
        assert (await reader.get("/"))[0] == 200  # by the cookie

    ask(use, run, token=TOKEN)


def test_another_name_for_this_machine_is_refused(run: Path) -> None:
    async def use(reader: Reader) -> None:
        port = reader.url.rpartition(":")[2]
        for host, expected in (
            (f"evil.example:{port}", 403),
            ("192.168.1.5", 403),
            ("", 403),
            (f"localhost:{port}", 200),
            (f"[::1]:{port}", 200),
        ):
            status, _, _ = await reader.get("/", headers={"Host": host})
            assert (host, status) == (host, expected)

    ask(use, run)


def test_it_only_reads_and_knows_no_paths(run: Path) -> None:
    async def use(reader: Reader) -> None:
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if "-shm" not in path.name}
        for path in ("/runs/gone", f"/runs/{quote('../mine', safe='')}", "/static/..%2Fserver.py", "/static/server.py"):
            assert (await reader.get(path))[0] == 404
        assert (await reader.get("/runs/mine/trajectories/lake-7.7"))[0] == 404
        assert (await reader.get("/compare"))[0] == 400
        async with reader.session.post(f"{reader.url}/runs/mine") as answer:
            assert answer.status == 405
        await reader.page("/runs/mine")
        assert before == {path: path.stat().st_mtime_ns for path in before}

    ask(use, run)


def test_a_run_without_a_ledger_and_a_single_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()

    async def use(reader: Reader) -> None:
        assert "ended before it had a ledger" in await reader.page("/runs/new")
        assert ">new<" in await reader.page("/")

    ask(use, run, tmp_path / "new")

    async def alone(reader: Reader) -> None:
        assert ">mine<" in await reader.page("/")  # redirected to it
        assert 'href="/"' not in await reader.page("/runs/mine")

    ask(alone, run, single=True)


def test_a_page_learns_that_the_run_has_gone_on(run: Path) -> None:
    async def use(reader: Reader) -> None:
        known = changes_of(await reader.page("/runs/mine"))
        async with reader.session.get(reader.url + known.replace("stamp=", "stamp=older")) as stream:
            assert stream.content_type == "text/event-stream"
            assert await stream.content.readline() == b"data: changed\n"
        async with reader.session.get(reader.url + known) as stream:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.content.readline(), 0.1)

    ask(use, run)


def test_the_last_state_is_shown_though_it_came_while_no_reading_was_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "mine")
    monkeypatch.setattr(server, "POLL_S", 0.005)

    async def use(reader: Reader) -> None:
        monkeypatch.setattr(readings, "REFRESH_S", 1e9)
        await reader.page("/runs/mine/functions")
        (run / "ledger.sqlite-wal").write_bytes(b"")  # the ledger goes on, and the run ends
        changes = changes_of(await reader.page("/runs/mine/functions"))
        async with reader.session.get(reader.url + changes) as stream:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.content.readline(), 0.05)
        monkeypatch.setattr(readings, "REFRESH_S", 0.0)
        monkeypatch.setattr(readings, "SHARE", 1e9)
        async with reader.session.get(reader.url + changes) as stream:
            assert await stream.content.read() == b"data: changed\n\n"
        changes = changes_of(await reader.page("/runs/mine/functions"))
        async with reader.session.get(reader.url + changes) as stream:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.content.readline(), 0.05)

    ask(use, run)


def changes_of(page: str) -> str:
    (changes,) = re.findall(r'data-changes="([^"]+)"', page)
    return str(changes).replace("&amp;", "&")


def test_a_value_is_read_once_per_state_of_its_ledger_and_not_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = write_run(tmp_path / "run")
    count = 0

    def read(reader: LedgerReader) -> int:
        nonlocal count
        count += 1
        return count

    async def main() -> None:
        known = readings.LedgerReadings(lambda _: False)
        assert [await known.read(again, "x", read) for _ in range(3)] == [1, 1, 1]
        assert await asyncio.gather(*(known.read(again, "y", read) for _ in range(3))) == [2, 2, 2]
        (again / "ledger.sqlite-wal").write_bytes(b"")
        assert await known.read(again, "x", read) == 1  # it was read just now
        monkeypatch.setattr(readings, "REFRESH_S", 0.0)
        monkeypatch.setattr(readings, "SHARE", 1e9)
        assert await known.read(again, "x", read) == 3
        for key in range(2 * readings.KEPT):
            await known.read(again, key, read)
        assert await known.read(again, "x", read) == count  # it was forgotten
        known.close()

    asyncio.run(main())
