"""Price lists: the effective prices of a cluster, reading several formats, merging, writing, and refreshing.

`refresh_prices` asks the providers for current prices, with the environment's credentials. Their own formats are
converted to price entries by pure functions: parsed JSON in, `PriceEntry` out. AWS publishes one offer per service and
region ("offer file": AWS Price List API, `offers/v1.0/aws/.../index.json`), and returns the same products one by one to
queries (`get_products`). Modal returns its workspace's rates by name.
"""

from __future__ import annotations

import asyncio
import csv
import datetime as dt
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from rollart.errors import ProviderError, RollartError, SpecError, UsageError
from rollart.settings.cluster import ClusterFunctions
from rollart.settings.load import builtin, load_cluster, load_price_changes, load_prices, price_list
from rollart.settings.prices import PriceEntry, PriceKind, PriceList, gpu_price_name, merged_prices
from rollart.settings.providers import with_plugin_prices

COLUMNS = ("name", "unit", "usd", "source", "date")
KIND = "kind"
"""A column that a price file may lack: its prices are on demand."""


@dataclass(frozen=True, slots=True)
class PriceChange:
    """A price before and after a merge; `before` is None for a new entry. `same`: only the source or the date
    changed."""

    name: str
    unit: str
    before: float | None
    after: float
    source: str
    kind: PriceKind = "on_demand"

    @property
    def same(self) -> bool:
        return self.before == self.after


def effective_prices(cluster: Path | None) -> list[PriceEntry]:
    """All effective prices of a cluster: those of its list, overridden by its `price_list` and its pools. The shipped
    prices without a cluster."""
    listed = base_list(cluster)
    if cluster is None:
        return listed.prices
    spec = load_cluster(cluster)
    day = dt.date.fromtimestamp(cluster.stat().st_mtime)
    own = [
        PriceEntry.model_construct(
            name=f"{pool.device}@{pool.name}",
            unit="device-hour",
            usd=pool.price,
            date=day,
            source=f"pool '{pool.name}' of {cluster.name}",
            kind=pool.price_kind,
        )
        for pool in spec.pools
        if pool.price is not None
    ]
    return merged_prices(with_plugin_prices(listed, spec.functions.chain), [*spec.price_list, *own]).prices


def base_list(cluster: Path | None) -> PriceList:
    """The list that a cluster spec names, by default the shipped one."""
    named = None if cluster is None else load_cluster(cluster).prices
    return load_prices(builtin("prices.yaml") if named is None or cluster is None else cluster.parent / named)


def read_prices(path: Path, *, region: str = "") -> list[PriceEntry]:
    """Entries of a file: a YAML price list, CSV or JSON of name, unit, usd, source and date, or an AWS offer file
    (AWSLambda, AmazonEC2). UsageError or SpecError with the location of the first problem."""
    try:
        if path.suffix == ".csv":
            return price_list({"prices": _csv(path)}, where=str(path)).prices
        if path.suffix == ".json":
            return _json(path, region)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}", remedy="give a price file") from None
    return load_price_changes(path).prices


def _csv(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise SpecError(
                f"columns {', '.join(missing)} are missing (rule: {','.join(COLUMNS)})", where=f"{path}:1:1"
            )
        rows = []
        for row in reader:
            if None in row or None in row.values():
                raise SpecError(f"a row needs {len(COLUMNS)} values", where=f"{path}:{reader.line_num}:1")
            kind = {KIND: row[KIND].strip()} if row.get(KIND, "").strip() else {}
            rows.append({column: row[column].strip() for column in COLUMNS} | kind)
        return rows


def _json(path: Path, region: str) -> list[PriceEntry]:
    try:
        given = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise SpecError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}") from None
    if isinstance(given, dict) and "offerCode" in given:
        readers = {"AWSLambda": lambda_prices, "AmazonEC2": ec2_prices}
        reader = readers.get(given["offerCode"])
        if reader is None:
            raise UsageError(f"{path}: an offer of {given['offerCode']} (rule: one of {', '.join(readers)})")
        found = reader(*products_of_offer(given), region)
    elif isinstance(given, dict) and "PriceList" in given:
        products, day = products_of(json.loads(one) if isinstance(one, str) else one for one in given["PriceList"])
        found = [*lambda_prices(products, day, region), *ec2_prices(products, day, region)]
    else:
        prices = given.get("prices") if isinstance(given, dict) else given
        return price_list({"prices": prices}, where=str(path)).prices
    if not found:
        where = f" of {region}" if region else ""
        raise UsageError(f"{path}: no price{where} that is of use here", remedy="check the offer and --region")
    return found


def merge_into(path: Path, new: Sequence[PriceEntry], *, cluster: Path | None, today: dt.date) -> list[PriceChange]:
    """Write a price list with the new entries to `path`, on top of the existing file or, for a new file, of the
    cluster's list; return the changes that they make, in their order. UsageError for the shipped list, for entries that
    need others, and if the file cannot be written; it is replaced atomically."""
    if path.resolve() == builtin("prices.yaml").resolve():
        raise UsageError(f"{path} is the shipped price list (rule: it stays as it is)", remedy="give another --into")
    before = load_price_changes(path) if path.exists() else base_list(cluster)
    merged = merged_prices(before, new)
    for entry, needed in merged.incomplete():
        raise UsageError(
            f"'{entry.name}' has a price per {entry.unit} and none per {needed}, which would count as $0 (rule: both)",
            remedy=f"add its price per {needed}, 0 if there is no charge",
        )
    lines = [
        f"# Written by `rollart prices` on {today}. Name it in a cluster spec: `prices: {path.name}`.",
        f"currency: {before.currency}",
        "prices:",
        *(_line(p) for p in merged.prices),
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".new")
        temporary.write_text("\n".join(lines) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", remedy="give a path that can be written with --into") from None
    known = {(p.name, p.unit, p.kind): p.usd for p in before.prices}
    return [PriceChange(p.name, p.unit, known.get((p.name, p.unit, p.kind)), p.usd, p.source, p.kind) for p in new]


def _line(p: PriceEntry) -> str:
    usd = format(Decimal(repr(p.usd)), "f")
    source = json.dumps(p.source, ensure_ascii=False)
    kind = "" if p.kind == "on_demand" else f", kind: {p.kind}"
    return f"  - {{name: {json.dumps(p.name)}, unit: {p.unit}, usd: {usd}, date: {p.date}{kind}, source: {source}}}"


SOURCES = ("aws_lambda", "modal")
"""Providers with a price API."""

DEFAULT_REGION = "us-east-1"
"""The default region, and the region of AWS's price API, which has prices of all regions."""


@dataclass(slots=True)
class RefreshedPrices:
    """New entries, unused names, and errors by provider."""

    entries: list[PriceEntry] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    failed: dict[str, RollartError] = field(default_factory=dict)


def refresh_prices(
    providers: Sequence[str],
    functions: ClusterFunctions,
    known: PriceList,
    *,
    root: Path,
    today: dt.date,
    region: str = "",
) -> RefreshedPrices:
    """Query each provider. `functions`: the settings of the cluster spec; `known`: the list to refresh.

    Raises if all providers failed: the only error, or a ProviderError that lists all.
    """
    found = RefreshedPrices()
    for provider in providers:
        try:
            if provider == "aws_lambda":
                found.entries += _lambda_prices(functions, region)
            else:
                entries, unused = modal_prices(_modal_rates(functions, root), known, today)
                found.entries += entries
                found.unused += [f"{provider}: {name}" for name in unused]
        except RollartError as error:
            found.failed[provider] = error
    if len(found.failed) < len(providers):
        return found
    errors = list(found.failed.values())
    if len(errors) == 1:
        raise errors[0]
    remedies = dict.fromkeys(f"{name}: {error.remedy}" for name, error in found.failed.items() if error.remedy)
    raise ProviderError("\n".join(error.message for error in errors), remedy="; ".join(remedies))


def _lambda_prices(functions: ClusterFunctions, region: str) -> list[PriceEntry]:
    """AWS Lambda's prices in the settings' region (`AWSPriceListService.GetProducts`)."""
    from rollart.launch.functions import function_settings, translated_errors
    from serverless.deploy.aws_session import Boto3Clients
    from serverless.deploy.aws_session import translate_errors as asking

    settings = function_settings("aws_lambda", functions)
    environment = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or DEFAULT_REGION
    where = region or settings.region or environment
    clients = Boto3Clients(settings.model_copy(update={"region": DEFAULT_REGION}))
    filters = [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": where}]
    with translated_errors("prices of AWS Lambda: "), asking("asking for prices"):
        try:
            pages = clients.of("pricing").get_paginator("get_products")
            answers = [
                json.loads(one)
                for page in pages.paginate(ServiceCode="AWSLambda", FormatVersion="aws_v1", Filters=filters)
                for one in page["PriceList"]
            ]
        finally:
            clients.close()
    entries = lambda_prices(*products_of(answers), where)
    if not entries:
        raise ProviderError(f"AWS lists no price of Lambda in {where}", remedy="check the region")
    return entries


def _modal_rates(functions: ClusterFunctions, root: Path) -> Mapping[str, Decimal]:
    from rollart.launch.functions import deployer, translated_errors
    from serverless.deploy.modal_app import ModalDeployer

    async def main() -> Mapping[str, Decimal]:
        async with deployer("modal", functions, root=root) as modal:
            assert isinstance(modal, ModalDeployer)
            return await modal.rates()

    with translated_errors("prices of Modal: "):
        return asyncio.run(main())


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
        return found, dt.date.fromisoformat(offer["publicationDate"][:10])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"not an AWS offer file: {type(error).__name__} {error}") from None


def products_of(answers: Iterable[Mapping[str, Any]]) -> tuple[list[Product], dt.date]:
    """Products of `get_products` responses, and their latest day. UsageError without products."""
    found, days = [], []
    try:
        for answer in answers:
            found.append(_product(answer["product"], answer["terms"].get("OnDemand", {})))
            days.append(dt.date.fromisoformat(answer["publicationDate"][:10]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"not an answer of AWS's price list: {type(error).__name__} {error}") from None
    if not days:
        raise UsageError("AWS's price list has no such product", remedy="check the region")
    return found, max(days)


def _product(product: Mapping[str, Any], terms: Mapping[str, Any]) -> Product:
    latest: Mapping[str, Any] = max(
        terms.values(), key=lambda one: str(one.get("effectiveDate", "")), default={"priceDimensions": {}}
    )
    first_tier = (
        _money(dimension["pricePerUnit"]["USD"])
        for dimension in latest["priceDimensions"].values()
        if Decimal(dimension.get("beginRange", "0")) == 0 and "USD" in dimension["pricePerUnit"]
    )
    return Product(product["sku"], product.get("productFamily", ""), product["attributes"], next(first_tier, None))


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

    Core and memory prices are those of `modal`, those of a GPU `modal-TYPE`, busy and idle alike, since a container is
    billed until it scales down. A device-hour price is replaced only if the price in `known` is Modal's: a rented
    GPU is another offer. Names with unknown words (a region, a surcharge) are unused.
    """
    listed = {
        _normalised_name(p.name): p.name
        for p in known.prices
        if p.unit == "device-hour" and p.source.startswith("Modal")
    }
    types = {_normalised_name(kind): gpu_price_name("modal", kind) for kind in known.gpu_prices("modal")}
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
        elif resource[:1] == ["gpu"] and (device := _normalised_name("".join(resource[1:]))) in listed | types:
            if device in listed:
                found.append(
                    _entry(listed[device], "device-hour", rate / per * 3600, day, f"Modal billing rates, {name}")
                )
            if device in types:
                found += _busy_and_idle("gpu-second", rate / per, day, name, price=types[device])
        else:
            unused.append(name)
    return found, unused


def _busy_and_idle(unit: str, usd: Decimal, day: dt.date, name: str, *, price: str = "modal") -> list[PriceEntry]:
    return [_entry(price, prefix + unit, usd, day, f"Modal billing rates, {name}") for prefix in ("", "idle-")]


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
