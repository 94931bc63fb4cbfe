"""RA-11 and RA-18 through the command's path: the specs are what the command plans, and the docs have what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import rollart
from benchmarks.papers import planned
from benchmarks.papers.planned import Term, mixed, needed, split
from rollart.cli.commands import cli
from rollart.settings.resolve import forecast, read_specs

DOCS = Path(rollart.__file__).parent.parent / "docs" / "placement.md"


def published() -> dict[str, tuple[float, float]]:
    """The docs' ratios of the plan and of the null model, by figure."""
    rows = re.findall(r"^\| RA-1[18] \| ([^|]+) \| [^|]+ \| ([\d.]+) \| ([\d.]+) \|", DOCS.read_text(), re.MULTILINE)
    return {name: (float(plan), float(null)) for name, plan, null in rows}


def test_the_term_that_is_named_has_to_move_least() -> None:
    far, near = Term("far", 1.0, 0.1, 16.0), Term("near", 1.0, 0.1, 16.0)

    def ratio(term: Term, value: float) -> float:
        return 2.0 if value >= (3.8 if term is far else 3) else 0.5

    found = needed(ratio, (far, near))
    assert found is not None
    assert found[0] is near
    assert 3 <= found[1] < 3.4
    assert needed(lambda *_: 0.5, (far, near)) is None


@pytest.mark.slow  # solves 12 plans
@pytest.mark.parametrize("model", planned.PUBLISHED)
def test_the_docs_have_what_ra_18_gives(model: str) -> None:
    told = published()
    for p in (1, 2, 3):
        assert split(model, p)[:2] == pytest.approx(told[f"{model}: {p}P{4 - p}D"], abs=0.011)


@pytest.mark.slow  # solves 8 plans
@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-32B"])
def test_the_docs_have_what_ra_11_gives(model: str) -> None:
    told, (plan, null, _) = published(), mixed(model)
    for i, name in enumerate(("72 H800", "208 H20")):
        assert (plan[i], null[i]) == pytest.approx(told[f"{model}: mix over {name}"], abs=0.011)


@pytest.mark.slow  # writes 12 pairs of specs, plans one of them twice
def test_the_written_specs_are_planned_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["planned", "--specs", str(tmp_path)])
    planned.main()
    pairs = sorted(tmp_path.glob("*/run.yaml"))
    assert len(pairs) == 12
    run, cluster = str(pairs[0]), str(pairs[0].parent / "cluster.yaml")
    result = CliRunner().invoke(cli, ["plan", run, "--cluster", cluster, "--fast"])
    assert result.exit_code == 0, result.output
    found = forecast(read_specs(run, cluster)).plan.placement
    assert found is not None
    assert f"{found.rate:.3g}" in result.output
