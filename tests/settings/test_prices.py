"""Prices: shipped, dated, and the bill of a call."""

from __future__ import annotations

import pytest

from rollart.settings.load import builtin, load_prices

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


def test_a_provider_without_prices_costs_nothing_and_shows_it() -> None:
    assert SHIPPED.function_usd("nobody", billed_s=1, memory_mb=1024) == 0.0
    assert SHIPPED.sources("nobody") == ()
