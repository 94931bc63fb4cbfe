"""Current prices from the providers, with the environment's credentials."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from rollart.compose.price_offers import lambda_prices, modal_prices, products_of
from rollart.compose.providers import deployer, translated_errors
from rollart.errors import ProviderError, RollartError
from rollart.spec.prices import PriceEntry, PriceList

__all__ = ["SOURCES", "RefreshedPrices", "refresh_prices"]

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
    settings: Mapping[str, Mapping[str, Any]],
    known: PriceList,
    *,
    root: Path,
    today: dt.date,
    region: str = "",
) -> RefreshedPrices:
    """Query each provider. `settings`: those of the cluster spec by provider; `known`: the list to refresh.

    Raises if all providers failed: the only error, or a ProviderError that lists all.
    """
    found = RefreshedPrices()
    for provider in providers:
        try:
            if provider == "aws_lambda":
                found.entries += _lambda_prices(settings.get(provider, {}), region)
            else:
                entries, unused = modal_prices(_modal_rates(settings.get(provider, {}), root), known, today)
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


def _lambda_prices(given: Mapping[str, Any], region: str) -> list[PriceEntry]:
    """AWS Lambda's prices in the settings' region (`AWSPriceListService.GetProducts`)."""
    from serverless.deploy.aws_session import Boto3Clients
    from serverless.deploy.aws_session import translate_errors as asking
    from serverless.deploy.aws_settings import AwsSettings

    settings = AwsSettings(**given)
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


def _modal_rates(given: Mapping[str, Any], root: Path) -> Mapping[str, Decimal]:
    from serverless.deploy.modal_app import ModalDeployer

    async def main() -> Mapping[str, Decimal]:
        async with deployer("modal", given, root=root) as modal:
            assert isinstance(modal, ModalDeployer)
            return await modal.rates()

    with translated_errors("prices of Modal: "):
        return asyncio.run(main())
