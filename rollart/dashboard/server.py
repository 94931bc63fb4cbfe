"""The dashboard's HTTP server: pages, reports as JSON, and events when a run has gone on. It only reads."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlencode

from aiohttp import web

from rollart.dashboard import pages
from rollart.dashboard.pages import PageHead, TrajectoryFilter
from rollart.dashboard.readings import LedgerReadings, RunSnapshot
from rollart.errors import RollartError, UsageError
from rollart.ledger.reader import LedgerReader
from rollart.report import cost, curve, utilization
from rollart.report import timeline as timelines
from rollart.report.render import STYLE, Child, render
from rollart.report.tables import Report, Table
from rollart.report.timeline import Timeline
from rollart.report.trajectories.decisions import why
from rollart.report.trajectories.found import find_trajectory
from rollart.report.trajectories.listing import SHORT, listed, order_of, recorded_outcomes
from rollart.report.trajectories.view import trajectory_report

STATIC = Path(__file__).parent / "static"

FILES = {
    "uplot.js": "text/javascript",
    "dashboard.js": "text/javascript",
    "uplot.css": "text/css",
    "dashboard.css": "text/css",
}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer. Nothing inline runs or styles; no other page frames or reads an answer."""

MOMENT_S = 1e-3
"""Shortest stretch that a timeline shows, in seconds."""

LONGEST_NUMBER = 12
"""Most digits of a row's number."""

POLL_S = 1.0
"""Seconds between two looks at a ledger's file while a page is open."""

BEAT_S = 15.0
"""Seconds after which an idle stream of events sends a comment, so that a closed page is noticed."""

MOST_RUNS = 50
"""Latest runs that the list shows."""

REPORTS = {"cost": cost.cost, "utilization": utilization.utilization, "curve": curve.curve}
"""Reports that are also served as JSON, in the form of `rollart report NAME -o json`."""

COOKIE = "rollart-dashboard"

TIMELINE, WITH_TIMELINE = "timeline", ("timeline", "functions", "environments")
"""The name of the timeline of a whole run among the readings, and the pages that show it."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class DashboardAccess:
    """Who may read. With a `token` every request needs it: as bearer token, in a cookie, or once as `?token=`, which
    sets the cookie. Without one the host that a browser asked for has to be this machine's loopback, so that no other
    site's name can be pointed at the server (DNS rebinding)."""

    token: str = ""

    def admits(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.cookies.get(
            self.cookie(request), ""
        )
        return not self.token or hmac.compare_digest(given.encode(), self.token.encode())

    def opens(self, request: web.Request) -> bool:
        return bool(self.token) and hmac.compare_digest(request.query.get("token", "").encode(), self.token.encode())

    def knows_host(self, request: web.Request) -> bool:
        try:
            host = request.url.host or ""
            return bool(self.token) or host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    @staticmethod
    def cookie(request: web.Request) -> str:
        """Cookies are shared by the ports of a host: each server has its own name."""
        return f"{COOKIE}-{request.url.port}"


class Dashboard:
    """The routes. `list_runs`: directories of runs, the latest first, looked up at each request; `single`: there is
    only one, and its page is the first. `is_running`: whether the controller of the run in a directory lives."""

    def __init__(
        self,
        list_runs: Callable[[], Sequence[Path]],
        is_running: Callable[[Path], bool],
        *,
        access: DashboardAccess,
        single: bool = False,
    ) -> None:
        self._list_runs = list_runs
        self._readings = LedgerReadings(is_running)
        self._access = access
        self._single = single
        self._ending = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        run = "/runs/{run}"
        app.add_routes(
            [
                web.get("/", self._runs),
                web.get("/compare", self._compare),
                web.get("/changes", self._changes, allow_head=False),
                web.get("/static/{file}", self._static),
                web.get("/favicon.ico", self._no_icon),
                web.get(run, self._tab),
                web.get(run + "/timeline", self._timeline),
                web.get(run + "/trajectories", self._trajectories),
                web.get(run + "/trajectories/{id}", self._trajectory),
                web.get(run + "/reports/{report}.json", self._report),
                web.get(run + "/{tab}", self._tab),
            ]
        )
        app.on_shutdown.append(self._end_streams)
        app.on_cleanup.append(self._close)
        return app

    async def _end_streams(self, app: web.Application) -> None:
        self._ending.set()

    async def _close(self, app: web.Application) -> None:
        self._readings.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._access.knows_host(request):
            return _refused(403, "this dashboard answers to localhost alone")
        if self._access.opens(request):
            rest = {name: value for name, value in request.query.items() if name != "token"}
            to = web.Response(status=303, headers=HEADERS | {"Location": str(request.rel_url.with_query(rest))})
            to.set_cookie(self._access.cookie(request), self._access.token, httponly=True, samesite="Strict")
            return to
        if not self._access.admits(request):
            return _refused(401, "no valid token: open the address that the dashboard printed")
        try:
            response = await handler(request)
        except web.HTTPException as error:
            return _refused(error.status, error.reason)
        except UsageError as error:
            return _refused(404, error.message)
        except RollartError as error:
            return _refused(500, error.message)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _directory(self, name: str) -> Path:
        """UsageError for a run that is not there. Names are looked up, never made into paths."""
        for path in self._list_runs():
            if path.resolve().name == name:
                return path
        raise UsageError(f"no run '{name}' here")

    async def _snapshot(self, request: web.Request) -> tuple[Path, RunSnapshot]:
        directory = self._directory(request.match_info["run"])
        return directory, await self._readings.snapshot(directory)

    async def _runs(self, request: web.Request) -> web.Response:
        directories = self._list_runs()[:MOST_RUNS]
        if self._single:
            return web.Response(status=303, headers={"Location": pages.run_path(directories[0].resolve().name)})
        found = [await self._readings.snapshot(directory) for directory in directories]
        return _page(PageHead("Runs", changes=_changes_of(found)), [*pages.runs_page(found)])

    async def _compare(self, request: web.Request) -> web.Response:
        names = request.query.getall("run", [])
        if not 1 <= len(names) <= pages.MOST_COMPARED:
            raise web.HTTPBadRequest(reason=f"{len(names)} runs to compare (rule: 1 to {pages.MOST_COMPARED})")
        found = [await self._readings.snapshot(self._directory(name)) for name in dict.fromkeys(names)]
        return _page(PageHead("Runs side by side", changes=_changes_of(found)), [*pages.compare_page(found)])

    async def _tab(self, request: web.Request) -> web.Response:
        directory, snapshot = await self._snapshot(request)
        tab = request.match_info.get("tab", pages.TABS[0])
        if tab not in pages.TABS:
            raise web.HTTPNotFound
        if snapshot.rows is None:
            return self._run_page(directory, snapshot, tab, pages.not_yet(snapshot))
        match tab:
            case "overview":
                parts = pages.overview(snapshot)
            case "cost":
                parts = pages.cost_page(snapshot)
            case "utilization":
                parts = pages.utilization_page(snapshot)
            case "engines":
                parts = pages.engines_page(snapshot)
            case "functions":
                parts = pages.functions_page(snapshot, await self._whole_timeline(directory))
            case _:
                parts = pages.environments_page(snapshot, await self._whole_timeline(directory))
        return self._run_page(directory, snapshot, tab, [*parts])

    async def _whole_timeline(self, directory: Path) -> Timeline:
        return await self._readings.read(directory, TIMELINE, timelines.timeline)

    async def _timeline(self, request: web.Request) -> web.Response:
        directory, snapshot = await self._snapshot(request)
        during = _during(request)
        if snapshot.rows is None:
            return self._run_page(directory, snapshot, "timeline", pages.not_yet(snapshot))
        if during is None:
            found = await self._whole_timeline(directory)
        else:
            t0, t1 = during[0], min(during[1], max(snapshot.rows.facts.seconds, during[0] + MOMENT_S))

            def read(reader: LedgerReader) -> Timeline:
                return timelines.timeline(reader, during=(t0, t1))

            found = await self._readings.read(directory, ("timeline", t0, t1), read)
        parts = [*pages.timeline_page(snapshot.name, found, whole=during is None)]
        return self._run_page(directory, snapshot, "timeline", parts, live=during is None)

    async def _trajectories(self, request: web.Request) -> web.Response:
        directory, snapshot = await self._snapshot(request)
        chosen = _filter(request)
        rows, prices = snapshot.rows, snapshot.prices
        if rows is None or prices is None:
            return self._run_page(directory, snapshot, "trajectories", pages.not_yet(snapshot))
        outcomes = recorded_outcomes(chosen.outcome or None)

        def read(reader: LedgerReader) -> Table:
            found = reader.trajectories(
                domain=chosen.domain or None,
                outcomes=outcomes,
                order=order_of(chosen.sort, prices),
                most=pages.PAGE_ROWS,
                offset=chosen.offset,
            )
            return listed(list(found), prices)

        table = await self._readings.read(directory, chosen, read)
        count = sum(
            c.trajectories
            for c in rows.charges
            if chosen.domain in ("", c.domain) and (not outcomes or c.outcome in outcomes)
        )
        domains = sorted({c.domain for c in rows.charges})
        known = sorted({SHORT.get(c.outcome, c.outcome) for c in rows.charges})
        parts = pages.trajectories_page(snapshot.name, chosen, table, count, domains, known)
        return self._run_page(directory, snapshot, "trajectories", [*parts], live=False)

    async def _trajectory(self, request: web.Request) -> web.Response:
        directory, snapshot = await self._snapshot(request)
        id_ = request.match_info["id"]

        def read(reader: LedgerReader) -> tuple[Report, Report, Timeline]:
            found = find_trajectory(reader, id_)
            row = found.row
            during = (row.t0, max(row.t1, row.t0 + MOMENT_S))
            bands = tuple(timelines.turn_bands(reader, [row], during))
            shown = Timeline(during[1] - during[0], timelines.BINS, bands, begins=row.t0)
            return trajectory_report(snapshot.name, found), why(reader, snapshot.name, found), shown

        report, decisions, timeline = await self._readings.read(directory, ("trajectory", id_), read)
        head = PageHead(id_, snapshot.name, snapshot.state, "trajectories", single=self._single)
        return _page(head, [*pages.trajectory_page(snapshot.name, report, decisions, timeline)])

    async def _report(self, request: web.Request) -> web.Response:
        _, snapshot = await self._snapshot(request)
        make = REPORTS.get(request.match_info["report"])
        if make is None or snapshot.rows is None:
            raise web.HTTPNotFound
        return web.Response(text=render(make(snapshot.rows), "json"), content_type="application/json")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        if name == "report.css":
            return web.Response(text=STYLE, content_type="text/css")
        if name not in FILES:
            raise web.HTTPNotFound
        return web.Response(body=(STATIC / name).read_bytes(), content_type=FILES[name], charset="utf-8")

    async def _no_icon(self, request: web.Request) -> web.Response:
        """Browsers ask for it by themselves."""
        return web.Response(status=204)

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: one when a run has gone on since the stamp that the page has of it, as soon as its ledger
        would be read again. The page is then fetched, and has the address of its next stream: what was read while the
        ledger went on is followed by another event, so that the last state of a run is shown."""
        directories = [self._directory(name) for name in request.query.getall("run", [])]
        known = request.query.getall("stamp", [])
        stream = web.StreamResponse(headers=HEADERS | {"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        loop = asyncio.get_running_loop()
        beat = loop.time()
        while not self._ending.is_set():
            stamps = [await self._readings.stamp(directory) for directory in directories]
            if stamps != known and all(map(self._readings.due, directories)):
                await stream.write(b"data: changed\n\n")
                break
            if loop.time() - beat >= BEAT_S:
                beat = loop.time()
                await stream.write(b":\n\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._ending.wait()
        return stream

    def _run_page(
        self, directory: Path, snapshot: RunSnapshot, tab: str, parts: Sequence[Child], *, live: bool = True
    ) -> web.Response:
        changes = ""
        if live:
            # Of a timeline from another state than the snapshot, the page is renewed once more.
            of_timeline = self._readings.stamp_of(directory, TIMELINE) if tab in WITH_TIMELINE else ""
            current = not of_timeline or snapshot.stamp.startswith(f"{of_timeline}.")
            changes = _changes_of([snapshot if current else replace(snapshot, stamp=of_timeline)])
        head = PageHead(snapshot.name, snapshot.name, snapshot.state, tab, changes, self._single)
        return _page(head, parts)


def _page(head: PageHead, parts: Sequence[Child]) -> web.Response:
    return web.Response(text=pages.document(head, parts), content_type="text/html")


def _refused(status: int, text: str) -> web.Response:
    head = PageHead(f"{status}")
    html = pages.document(head, pages.failure(text))
    return web.Response(status=status, text=html, content_type="text/html", headers=HEADERS)


def _changes_of(snapshots: Sequence[RunSnapshot]) -> str:
    """The address of the events of a page with these runs."""
    return f"/changes?{urlencode([*(('run', s.name) for s in snapshots), *(('stamp', s.stamp) for s in snapshots)])}"


def _filter(request: web.Request) -> TrajectoryFilter:
    """HTTPBadRequest for an unknown order or a row that is no number."""
    given = request.query
    sort, offset = given.get("sort", pages.SORTS[0]), given.get("offset", "0")
    if sort not in pages.SORTS or not offset.isdecimal() or len(offset) > LONGEST_NUMBER:
        raise web.HTTPBadRequest(reason=f"sort and offset (rule: one of {', '.join(pages.SORTS)}, and a row's number)")
    return TrajectoryFilter(given.get("domain", ""), given.get("outcome", ""), sort, int(offset))


def _during(request: web.Request) -> tuple[float, float] | None:
    """The stretch that a timeline is asked for; HTTPBadRequest if it is none."""
    if not {"t0", "t1"} & request.query.keys():
        return None
    try:
        t0, t1 = (float(request.query[name]) for name in ("t0", "t1"))
    except (KeyError, ValueError):
        t0, t1 = 0.0, 0.0
    if not (math.isfinite(t0) and math.isfinite(t1) and 0.0 <= t0 < t1):
        raise web.HTTPBadRequest(reason="t0 and t1 (rule: seconds of the run, 0 <= t0 < t1)")
    return t0, max(t1, t0 + MOMENT_S)
