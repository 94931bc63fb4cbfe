"""`rollart simulate` and `rollart report timeline` as pages, through the command line."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rollart.report.tables import estimate
from tests.cli.conftest import Result
from tests.tools.test_simulate import CLUSTER, RUN

pytestmark = pytest.mark.slow  # plans, and simulates four times


def headings(text: str) -> list[str]:
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    return ["".join(found.itertext()) for found in root.iter("h3")]


def test_a_page_beside_the_figures(rollart: Callable[..., Result], tmp_path: Path) -> None:
    Path("run.yaml").write_text(RUN)
    Path("c.yaml").write_text(CLUSTER)
    common = ["simulate", "run.yaml", "--cluster", "c.yaml", "--steps", "2", "--workers", "1"]
    done = rollart(
        *common, "--policies", "sync,rollart", "--seeds", "2", "--html", "pages/a.html", "-o", "json", "--keep", "kept"
    )
    assert done.code == 0, done.err
    assert done.err.endswith("page: pages/a.html\n")
    tables = json.loads(done.out)["tables"]
    page = Path("pages/a.html").read_text()
    assert {"Step time", "Throughput", "Cost", "Staleness", "sync, seed 0", "rollart, seed 0"} <= set(headings(page))
    assert "sync, seed 1" not in headings(page), "a timeline is one seed's"
    step = next(row for row in tables["figures"] if row["figure"] == "step_s")
    assert estimate(step["sync"], step["sync ±"]) in page
    assert "trainer-0 on " in page
    drawn = rollart("report", "timeline", "kept/sync-0", "-o", "html")
    assert drawn.code == 0, drawn.err
    assert "Who did what when" in headings(drawn.out)
    cost = rollart("report", "cost", "kept/sync-0", "-o", "html")
    assert "Total of what is billed" in headings(cost.out)
    again = rollart(*common, "--policies", "sync,rollart", "--keep", "kept")
    assert again.code == 2
    assert again.err.startswith("rollart: kept/sync-0 holds something already")
    assert not again.out


def test_reports_of_a_kept_ledger_count_tokens_not_pieces(rollart: Callable[..., Result]) -> None:
    Path("run.yaml").write_text(RUN)
    Path("c.yaml").write_text(CLUSTER)
    done = rollart("simulate", "run.yaml", "--cluster", "c.yaml", "--steps", "2", "--keep", "kept", "-o", "json")
    assert done.code == 0, done.err
    (name,) = (path.name for path in Path("kept").iterdir())
    report = json.loads(rollart("report", "cost", f"kept/{name}", "-o", "json").out)
    total = {row["what"]: row["value"] for row in report["tables"]["total"] if row["unit"] in ("count", "USD")}
    charged = csv.DictReader(io.StringIO(rollart("report", "cost", f"kept/{name}", "-o", "focus").out))
    assert math.fsum(float(row["BilledCost"]) for row in charged) == pytest.approx(total["total"])
    used = json.loads(rollart("report", "utilization", f"kept/{name}", "-o", "json").out)["tables"]
    (sampled,) = (row["count"] for row in used["rates"] if row["what"] == "sampled tokens")
    assert total["trajectories generated"] >= total["trajectories trained"] > 0
    sets = json.loads(rollart("report", "bias", f"kept/{name}", "-o", "json").out)["tables"]["sets"]
    trained = next(row for row in sets if row["set"] == "trained")
    assert trained["trajectories"] == total["trajectories trained"]
    assert trained["trajectories"] * trained["length"] == pytest.approx(total["trained tokens"])
    share = total["trained tokens"] / sampled
    assert 0.2 < share <= 1.0, "what is trained was sampled, and most of what is sampled is trained"


def test_a_page_that_cannot_be_written_is_told_before_the_work(rollart: Callable[..., Result]) -> None:
    Path("run.yaml").write_text(RUN)
    Path("c.yaml").write_text(CLUSTER)
    Path("file").write_text("")
    done = rollart("simulate", "run.yaml", "--cluster", "c.yaml", "--steps", "1", "--html", "file/a.html")
    assert done.code == 2
    assert done.err.startswith("rollart: file/a.html: ")
    assert "steps in" not in done.err, "nothing was simulated"


@pytest.mark.parametrize(
    ("option", "told"), [("--html", "rollart: there: it is a directory"), ("--keep", "rollart: file/")]
)
def test_names_that_something_else_has(rollart: Callable[..., Result], option: str, told: str) -> None:
    Path("run.yaml").write_text(RUN)
    Path("c.yaml").write_text(CLUSTER)
    Path("file").write_text("")
    Path("there").mkdir()
    name = "there" if option == "--html" else "file"
    done = rollart("simulate", "run.yaml", "--cluster", "c.yaml", "--steps", "1", option, name)
    assert done.code == 2
    assert done.err.startswith(told)
    assert "steps in" not in done.err, "nothing was simulated"
