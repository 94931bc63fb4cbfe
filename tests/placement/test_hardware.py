"""The catalogue states sourced figures or nothing, and users can add to it."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import tomllib
from dataclasses import fields
from importlib.resources import files

import pytest
import yaml

from placement.hardware import canonical, catalogue, device, override
from placement.types import FIGURES, Device

NAMES = ["H100", "H200", "H800", "H20", "B200", "A100-80", "A100-40", "A10G", "L40S", "L4", "MI300X", "cpu"]


def test_it_lists_the_types_of_the_documentation() -> None:
    assert list(catalogue()) == NAMES
    assert all(known.name == name for name, known in catalogue().items())


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_dated_source_and_nothing_else_has(name: str) -> None:
    data = tomllib.loads(files("placement").joinpath("hardware.toml").read_text(encoding="utf-8"))
    known, figures = catalogue()[name], data["devices"][name]
    assert {f for f in FIGURES if getattr(known, f) is not None} == set(figures) - {"generation"}
    for figure in figures.keys() - {"generation"}:
        source = data["sources"][figures[figure]["s"]]
        assert source["text"]
        assert dt.date(2020, 1, 1) < source["date"] <= dt.date(2026, 12, 31)
        assert source["text"] in known.source


def test_figures_are_dense() -> None:
    """fp8 runs at twice bf16 on every part that has it: a sparse figure among them would stand out."""
    for d in catalogue().values():
        if d.tflops_fp8 is not None and d.tflops_bf16 is not None:
            assert d.tflops_fp8 / d.tflops_bf16 == pytest.approx(2.0, rel=0.03), d.name
    assert device("H100").tflops_bf16 == 989  # the sparse figure of the datasheet is 1,979


def test_the_figures_of_rollmux_table_1() -> None:
    h20, h800 = device("H20"), device("H800")
    assert (h20.tflops_bf16, h20.memory_gb, h20.memory_tb_per_s) == (148, 96, 4.0)
    assert (h800.tflops_bf16, h800.memory_gb, h800.memory_tb_per_s) == (989.5, 80, 3.35)


def test_a_cpu_core_states_nothing() -> None:
    cpu = device("cpu")
    assert cpu.is_cpu
    assert all(getattr(cpu, f) is None for f in FIGURES)


def test_what_a_part_has_not_is_absent() -> None:
    assert device("A100-80").tflops_fp8 is None
    assert device("L40S").nvlink_gb_per_s is None
    assert device("H20").link_gb_per_s is None


def test_aliases() -> None:
    assert canonical("A100") == "A100-80"
    assert device("A100") is device("A100-80")
    assert device("CPU").name == "cpu"
    with pytest.raises(ValueError, match="'A10' is not in the catalogue"):
        device("A10")  # another card than the A10G


@pytest.mark.parametrize(("typed", "meant"), [("H80", "H800"), ("h100", "H100"), ("mi300", "MI300X"), ("a100", "A100")])
def test_a_typing_error_gets_a_suggestion(typed: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        device(typed)


def test_the_catalogue_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        catalogue()["H100"] = catalogue()["H200"]  # type: ignore[index]


def test_override_changes_what_it_is_told_and_keeps_the_rest() -> None:
    mine = override("H20", source="our rack", memory_gb=141, link_gb_per_s=25)
    assert (mine.memory_gb, mine.link_gb_per_s, mine.tflops_bf16, mine.generation) == (141, 25, 148, "hopper")
    assert mine.source.startswith("our rack; the rest as H20: ")
    assert device("H20").memory_gb == 96


def test_override_makes_a_new_type() -> None:
    derived = override("H100-NVL", base="H100", source="datasheet", memory_gb=94, nvlink_gb_per_s=None)
    assert (derived.name, derived.memory_gb, derived.nvlink_gb_per_s, derived.watts) == ("H100-NVL", 94, None, 700)
    own = override("TPU-x", source="me", tflops_bf16=100, memory_gb=16, memory_tb_per_s=1, generation="x")
    assert own == Device("TPU-x", 100, 16, 1, "me", generation="x")
    assert own.devices_per_host is None


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("figure", FIGURES)
def test_override_refuses_nonsense(figure: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"device X: {figure} is .*rule: a finite number above 0"):
        override("X", source="me", **{figure: value})  # type: ignore[arg-type]


def test_override_names_its_mistakes() -> None:
    with pytest.raises(ValueError, match="source is ' '"):
        override("X", source=" ", memory_gb=1)
    with pytest.raises(ValueError, match="did you mean 'H100'"):
        override("X", base="H10", source="me")


def test_figures_are_the_fields_of_device() -> None:
    assert {f.name for f in fields(Device)} == {*FIGURES, "name", "source", "generation"}


def test_every_gpu_has_a_dated_price() -> None:
    listed = yaml.safe_load(files("rollart").joinpath("configs/prices.yaml").read_text(encoding="utf-8"))
    priced = {p["name"]: p for p in listed["prices"] if p["unit"] == "device-hour"}
    assert set(NAMES) <= set(priced)
    assert all(p["usd"] > 0 and p["source"] and p["date"] for p in priced.values())
    assert (priced["H800"]["usd"], priced["H20"]["usd"]) == (5.28, 1.85)
    assert priced["A100"]["usd"] == priced["A100-80"]["usd"]


# A separate process, since modules that this one has already imported would hide the module's imports.
@pytest.mark.slow
def test_it_loads_without_rollart_and_scipy() -> None:
    code = (
        "import sys, placement.hardware as h; h.device('H20'); "
        "bad = {'rollart', 'serverless', 'scipy', 'numpy', 'yaml'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
