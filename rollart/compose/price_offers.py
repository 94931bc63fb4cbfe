"""Providers' own price formats, converted to price entries. Pure: parsed JSON in, `PriceEntry` out.

AWS publishes one offer per service and region ("offer file": AWS Price List API, `offers/v1.0/aws/.../index.json`), and
returns the same products one by one to queries (`get_products`). Modal returns its workspace's rates by name.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from rollart.errors import UsageError
from rollart.spec.prices import PriceEntry, PriceList

__all__ = ["Product", "ec2_prices", "lambda_prices", "modal_prices", "products_of", "products_of_offer"]

LAMBDA_GROUPS = {
    "AWS-Lambda-Duration": ("aws_lambda", "GB-second", 1),
    "AWS-Lambda-Duration-ARM": ("aws_lambda-arm", "GB-second", 1),
    "AWS-Lambda-Requests": ("aws_lambda", "million-requests", 1_000_000),
    "AWS-Lambda-Requests-ARM": ("aws_lambda-arm", "million-requests", 1_000_000),
    "AWS-Lambda-Provisioned-Concurrency": ("aws_lambda", "idle-GB-second", 1),
    "AWS-Lambda-Provisioned-Concurrency-ARM": ("aws_lambda-arm", "idle-GB-second", 1),
}
"""By product group: name and unit of the price entry, and the number of AWS units in one of its units."""

EC2_FAMILIES = {
    "g4dn": "T4",
    "g5": "A10G",
    "g6": "L4",
    "g6e": "L40S",
    "p4d": "A100-40",
    "p4de": "A100-80",
    "p5": "H100",
    "p5e": "H200",
    "p5en": "H200",
    "p6-b200": "B200",
    "c6i": "cpu",
    "c7i": "cpu",
}
"""Device by instance family. A `cpu` is a physical core: two vCPUs of these families."""

THREADS_PER_CORE = 2


@dataclass(frozen=True, slots=True)
class Product:
    """A product of an AWS offer. `usd`: the on-demand price of its first tier, None if there is none in dollars."""

    sku: str
    family: str
    attributes: Mapping[str, str]
    usd: Decimal | None

    @property
    def region(self) -> str:
        return self.attributes.get("regionCode", "")


def products_of_offer(offer: Mapping[str, Any]) -> tuple[list[Product], dt.date]:
    """Products of an offer file, and its publication day. UsageError for another file."""
    try:
        on_demand = offer["terms"].get("OnDemand", {})
        found = [_product(one, on_demand.get(sku, {})) for sku, one in offer["products"].items()]
        return found, _day(offer["publicationDate"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"not an AWS offer file: {type(error).__name__} {error}") from None


def products_of(answers: Iterable[Mapping[str, Any]]) -> tuple[list[Product], dt.date]:
    """Products of `get_products` responses, and their latest day. UsageError without products."""
    found, days = [], []
    try:
        for answer in answers:
            found.append(_product(answer["product"], answer["terms"].get("OnDemand", {})))
            days.append(_day(answer["publicationDate"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"not an answer of AWS's price list: {type(error).__name__} {error}") from None
    if not days:
        raise UsageError("AWS's price list has no such product", remedy="check the region")
    return found, max(days)


def _product(product: Mapping[str, Any], terms: Mapping[str, Any]) -> Product:
    return Product(product["sku"], product.get("productFamily", ""), product["attributes"], _first_tier(terms))


def _first_tier(terms: Mapping[str, Any]) -> Decimal | None:
    """Dollars of the tier from 0 on, of the latest term."""
    if not terms:
        return None
    term = max(terms.values(), key=lambda one: str(one.get("effectiveDate", "")))
    for dimension in term["priceDimensions"].values():
        if Decimal(dimension.get("beginRange", "0")) == 0 and "USD" in dimension["pricePerUnit"]:
            return _money(dimension["pricePerUnit"]["USD"])
    return None


def lambda_prices(products: Iterable[Product], day: dt.date, region: str = "") -> list[PriceEntry]:
    """AWS Lambda's prices in a region. UsageError if the products span several regions and none is named.

    Of several products in a group the plainest one counts: the shortest usage type.
    """
    own = _of_region([p for p in products if p.attributes.get("group") in LAMBDA_GROUPS and p.usd], region)
    best: dict[str, Product] = {}
    for product in sorted(own, key=lambda p: (len(p.attributes.get("usagetype", "")), p.sku)):
        best.setdefault(product.attributes["group"], product)
    return [
        _entry(
            *LAMBDA_GROUPS[group][:2],
            (product.usd or Decimal(0)) * LAMBDA_GROUPS[group][2],
            day,
            f"AWS Lambda {product.region}, {product.attributes.get('usagetype', product.sku)}",
        )
        for group, product in sorted(best.items())
    ]


def ec2_prices(products: Iterable[Product], day: dt.date, region: str = "") -> list[PriceEntry]:
    """Dollars per device-hour on Linux, on demand, on shared hardware; for each device the cheapest instance per
    device."""
    offered = []
    for product in products:
        device, devices = _devices(product.attributes)
        if device and devices and product.usd and product.family.startswith("Compute Instance"):
            offered.append((product, device, product.usd / devices))
    kept = {p.sku for p in _of_region([p for p, _, _ in offered], region)}
    best: dict[str, tuple[Decimal, Product]] = {}
    for product, device, usd in offered:
        if product.sku in kept and (device not in best or usd < best[device][0]):
            best[device] = (usd, product)
    return [
        _entry(device, "device-hour", usd, day, f"AWS EC2 {p.region}, {p.attributes['instanceType']} on demand")
        for device, (usd, p) in sorted(best.items())
    ]


def _devices(attributes: Mapping[str, str]) -> tuple[str, Decimal]:
    """The device type and number of an instance; ('', 0) for instances that do not count."""
    plain = {"operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used"}
    if any(attributes.get(key) != value for key, value in plain.items()):
        return "", Decimal(0)
    device = EC2_FAMILIES.get(attributes.get("instanceType", "").partition(".")[0], "")
    if device == "cpu":
        return device, _money(attributes.get("vcpu", "0")) / THREADS_PER_CORE
    return device, _money(attributes.get("gpu", "0"))


def _of_region(products: Sequence[Product], region: str) -> list[Product]:
    """Products of a region; without a named one, of the only region present."""
    regions = sorted({p.region for p in products if p.region})
    if not region and len(regions) > 1:
        shown = ", ".join(regions[:5]) + (", ..." if len(regions) > 5 else "")
        raise UsageError(f"prices of {len(regions)} regions ({shown})", remedy="name one with --region")
    return [p for p in products if p.region == (region or p.region)]


CPU_WORDS, MEMORY_WORDS = {"cpu", "core"}, {"memory", "mem", "gib"}
IGNORED_WORDS = {"modal", "per", "usd", "container"}
SECONDS_PER_UNIT = {"second": 1, "seconds": 1, "sec": 1, "hour": 3600, "hours": 3600}


def modal_prices(rates: Mapping[str, Decimal], known: PriceList, day: dt.date) -> tuple[list[PriceEntry], list[str]]:
    """Entries from a workspace's rates, and the unused names.

    Core and memory prices are those of `modal`, busy and idle alike, since a container is billed until it scales down.
    A device-hour price is replaced only if the price in `known` is Modal's: a rented GPU is another offer. Names with
    unknown words (a region, a surcharge) are unused.
    """
    listed = {
        _normalised_name(p.name): p.name
        for p in known.prices
        if p.unit == "device-hour" and p.source.startswith("Modal")
    }
    found: list[PriceEntry] = []
    unused: list[str] = []
    for name, rate in sorted(rates.items()):
        words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in IGNORED_WORDS]
        per = next((SECONDS_PER_UNIT[word] for word in words if word in SECONDS_PER_UNIT), 0)
        resource = [word for word in words if word not in SECONDS_PER_UNIT]
        if not per:
            unused.append(name)
        elif set(resource) == CPU_WORDS:
            found += _busy_and_idle("core-second", rate / per, day, name)
            if "cpu" in listed:
                found.append(_entry("cpu", "device-hour", rate / per * 3600, day, f"Modal billing rates, {name}"))
        elif resource and set(resource) <= MEMORY_WORDS and "gib" in resource:
            found += _busy_and_idle("GiB-second", rate / per, day, name)
        elif resource[:1] == ["gpu"] and _normalised_name("".join(resource[1:])) in listed:
            device = listed[_normalised_name("".join(resource[1:]))]
            found.append(_entry(device, "device-hour", rate / per * 3600, day, f"Modal billing rates, {name}"))
        else:
            unused.append(name)
    return found, unused


def _busy_and_idle(unit: str, usd: Decimal, day: dt.date, name: str) -> list[PriceEntry]:
    return [_entry("modal", prefix + unit, usd, day, f"Modal billing rates, {name}") for prefix in ("", "idle-")]


def _normalised_name(name: str) -> str:
    return name.lower().replace("-", "").removesuffix("gb")


def _entry(name: str, unit: str, usd: Decimal, day: dt.date, source: str) -> PriceEntry:
    return PriceEntry.model_validate(
        {"name": name, "unit": unit, "usd": float(round(usd, 12)), "source": source, "date": day}
    )


def _money(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal(0)


def _day(stamp: str) -> dt.date:
    return dt.date.fromisoformat(stamp[:10])
