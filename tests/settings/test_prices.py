"""Prices: shipped, dated, and the bill of a call."""

from __future__ import annotations

import datetime as dt
import importlib
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollart.errors import SpecError
from rollart.settings.cluster import ClusterFunctions, ClusterSpec
from rollart.settings.load import builtin, load_prices
from rollart.settings.planning import pools_of
from rollart.settings.prices import PriceEntry, PriceList, Unit, gpu_price_name, gpu_price_parts
from rollart.settings.providers import RESERVED, with_plugin_prices
from rollart.settings.rules import price_problems
from serverless.providers.plugin import ListPrice
from serverless.types import TokenUsage

SHIPPED = load_prices(builtin("prices.yaml"))


def test_the_shipped_list() -> None:
    assert [SHIPPED.sources(device)[0].usd for device in ("H800", "H20")] == [5.28, 1.85]
    assert all(price.source for price in SHIPPED.sources("local"))


def test_a_million_calls_of_50_ms_at_1769_mb_cost_what_aws_says() -> None:
    bill = SHIPPED.function_usd("aws_lambda", billed_s=0.05 * 1e6, memory_mb=1769, requests=1_000_000)
    assert bill == pytest.approx(1.64, abs=0.005)


def test_modal_counts_cores_and_memory() -> None:
    bill = SHIPPED.function_usd("modal", billed_s=0.05 * 1e6, memory_mb=1024, requests=1_000_000)
    assert bill == pytest.approx(0.77, abs=0.005)


@pytest.mark.parametrize(
    ("gpu", "per_second"),
    [("L4", 0.000222), ("l4:2", 0.000444), ("H100!", 0.001097), ("A100", 0.000583), ("A100-80GB:4", 0.002776)],
)
def test_a_gpu_is_billed_beside_cores_and_memory_busy_and_idle(gpu: str, per_second: float) -> None:
    plain = SHIPPED.function_usd("modal", billed_s=10, memory_mb=2048)
    assert SHIPPED.function_usd("modal", billed_s=10, memory_mb=2048, gpu=gpu) == pytest.approx(plain + 10 * per_second)
    idle = SHIPPED.idle_usd("modal", seconds=60, memory_mb=2048, gpu=gpu)
    assert idle == pytest.approx(6 * (plain + 10 * per_second)), "a container that waits costs what a busy one does"
    assert SHIPPED.prices_gpu("modal", gpu)


def test_a_gpu_without_a_price_is_known_to_have_none() -> None:
    assert not SHIPPED.prices_gpu("modal", "TPU")
    assert not SHIPPED.prices_gpu("aws_lambda", "L4")
    assert SHIPPED.prices_gpu("aws_lambda", "")


def price(name: str, unit: Unit, usd: float = 1.0) -> PriceEntry:
    return PriceEntry(name=name, unit=unit, usd=usd, source="the test", date=dt.date(2026, 7, 1))


def test_a_gpu_without_an_idle_price_is_known_to_lack_one() -> None:
    busy = price("modal-L4", "gpu-second")
    assert not PriceList(prices=[busy]).prices_gpu("modal", "L4")
    assert PriceList(prices=[busy, price("modal-L4", "idle-gpu-second", 0.0)]).prices_gpu("modal", "L4")


def test_a_model_without_an_output_price_is_known_to_lack_one() -> None:
    used = TokenUsage("api.example", "m", 1, 1_000_000, output_tokens=1_000_000)
    partial = price("api.example/m", "million-input-tokens")
    assert not PriceList(prices=[partial]).prices_tokens(used)
    both = [price("m", "million-input-tokens", 2.0), price("m", "million-output-tokens", 3.0)]
    listed = PriceList(prices=[partial, *both])
    assert listed.prices_tokens(used)
    assert listed.token_usd(used) == 5.0, "the complete prices, not half of each"


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ([("api.example/m", "million-input-tokens")], "million-output-tokens"),
        ([("modal", "idle-core-second"), ("modal-L4", "gpu-second")], "idle-gpu-second"),
        ([("n-H100", "gpu-second"), ("n-H100", "idle-gpu-second"), ("n-L4", "gpu-second")], "idle-gpu-second"),
        ([("n", "core-second"), ("n-L4", "gpu-second")], None),
        ([("api.example/m", "million-output-tokens")], None),
    ],
)
def test_a_list_with_half_of_a_price_is_refused(given: list[tuple[str, Unit]], needed: str | None) -> None:
    """A provider that charges nothing for idle workers may leave out the idle price of its GPUs."""
    found = price_problems(PriceList(prices=[price(name, unit) for name, unit in given]))
    if needed is None:
        assert found == []
    else:
        (problem,) = found
        assert problem.loc == ("prices", len(given) - 1, "unit")
        assert f"none per {needed}" in problem.message
        assert needed in problem.remedy


@pytest.mark.parametrize("kind", ["L4", "A100-80GB", "RTX-PRO-6000"])
def test_the_name_of_a_gpu_price_has_its_provider_and_type(kind: str) -> None:
    assert gpu_price_parts(gpu_price_name("aws_lambda", kind)) == ("aws_lambda", kind)


def test_a_plugin_prices_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions name a type in several ways; prices are found by one of them."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fixtures" / "nebula")
    nebula = importlib.import_module("rollart_nebula").PLUGIN
    monkeypatch.setattr("rollart.settings.providers.plugin", lambda name: nebula)
    listed = with_plugin_prices(SHIPPED, ["nebula"])
    plain = listed.function_usd("nebula", billed_s=10, memory_mb=1024)
    assert plain == pytest.approx(10 * 0.00002)
    assert listed.function_usd("nebula", billed_s=10, memory_mb=1024, gpu="l4:2") == pytest.approx(plain + 20 * 0.0002)
    assert listed.idle_usd("nebula", seconds=10, memory_mb=1024, gpu="L4!") == pytest.approx(10 * 0.0001)
    assert listed.prices_gpu("nebula", "L4")
    mine = PriceList(prices=[*SHIPPED.prices, price("nebula-L4", "gpu-second", 7.0)])
    assert with_plugin_prices(mine, ["nebula"]).gpu_prices("nebula")["L4"].usd == 7.0, "a user's price comes first"


@pytest.mark.parametrize(("unit", "gpu"), [("gpu-second", ""), ("idle-gpu-second", ""), ("core-second", "L4")])
def test_a_plugin_names_the_type_of_a_gpu_price_and_of_no_other(unit: str, gpu: str) -> None:
    with pytest.raises(ValueError, match="rule: a GPU type"):
        ListPrice(unit, 1.0, "the test", "2026-07-01", gpu=gpu)


def test_no_plugin_has_the_name_of_a_key_of_functions() -> None:
    assert ClusterFunctions.model_fields.keys() <= RESERVED


def test_a_provider_without_prices_costs_nothing_and_shows_it() -> None:
    assert SHIPPED.function_usd("nobody", billed_s=1, memory_mb=1024) == 0.0
    assert SHIPPED.sources("nobody") == ()


def test_a_pool_pays_the_price_of_its_kind() -> None:
    entries = [
        *(
            {"name": "H800", "usd": usd, "source": "the test", "date": "2026-07-01", "kind": kind}
            for kind, usd in KINDS
        ),
    ]

    def usd(given: dict[str, object], prices: list[dict[str, object]] | None = None) -> float:
        cluster = ClusterSpec.model_validate(
            {"name": "c", "pools": [{"name": "p", "device": "H800", "count": 8, **given}]}
        )
        listed = PriceList.model_validate({"prices": entries if prices is None else prices})
        return pools_of(cluster, listed)[0].usd_per_device_hour

    assert usd({}) == 5.0
    assert usd({"rented": True, "spot": True}) == 2.0
    assert usd({"rented": True, "spot": True}, entries[:1]) == 5.0, "a list without a spot price"
    assert usd({"commitment": "reserved"}) == 3.0
    assert usd({"commitment": "committed"}) == 4.0
    assert usd({"commitment": "reserved", "price": 1.5}) == 1.5
    with pytest.raises(SpecError, match="device 'H800' has no reserved price"):
        usd({"commitment": "reserved"}, entries[:1])
    with pytest.raises(ValidationError, match="it is paid, used or not"):
        usd({"commitment": "reserved", "rented": True})
    with pytest.raises(ValidationError, match="rule: on_demand, or of device-hours"):
        PriceEntry.model_validate({**entries[1], "unit": "GB-second"})
    assert SHIPPED.function_usd("aws_lambda", billed_s=1.0, memory_mb=1024) == pytest.approx(1.68667e-5)


KINDS = (("on_demand", 5.0), ("spot", 2.0), ("reserved", 3.0), ("committed", 4.0))
