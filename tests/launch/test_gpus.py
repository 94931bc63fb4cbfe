"""GPUs of this machine that are visible to each part."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from placement.types import Role
from rollart.errors import SpecError
from rollart.launch.layout import engine_actor, trainer_actors
from rollart.settings.resolve import Resolved, resolve_files

POOLS = [
    {"name": "cores", "device": "cpu", "count": 8},
    {"name": "train", "device": "H100", "count": 2, "price": 2.0},
    {"name": "serve", "device": "H20", "count": 2, "price": 1.0},
]


def resolved(path: Path) -> Resolved:
    """The trainer on the first two GPUs, an engine on each of the others."""
    cluster = {
        "name": "c",
        "pools": POOLS,
        "engines": {"count": 2, "device": "H20"},
        "trainer": {"device": "H100", "threads": 2},
    }
    (path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    return resolve_files(None, path / "cluster.yaml")


@pytest.mark.parametrize(
    ("given", "train", "serve"),
    [
        (None, "0,1", ["2", "3"]),
        ("", "0,1", ["2", "3"]),
        ("4,5,6,7", "4,5", ["6", "7"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", "GPU-a,GPU-b", ["GPU-c", "GPU-d"]),
    ],
)
def test_pools_share_no_gpu_and_take_those_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, train: str, serve: list[str]
) -> None:
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    run = resolved(tmp_path)
    assert dict(trainer_actors(run, tmp_path, tmp_path / "t.json")[0].kwargs["env"])["CUDA_VISIBLE_DEVICES"] == train
    engines = [engine_actor(run, tmp_path, engine) for engine in run.plan.of(Role.ENGINE)]
    assert [dict(e.kwargs["env"])["CUDA_VISIBLE_DEVICES"] for e in engines] == serve


def test_fewer_gpus_than_the_pools_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    run = resolved(tmp_path)
    with pytest.raises(SpecError, match=r"pool 'serve' takes GPU 3 of this machine, .* is '4,5,6' \(rule:"):
        [engine_actor(run, tmp_path, engine) for engine in run.plan.of(Role.ENGINE)]
