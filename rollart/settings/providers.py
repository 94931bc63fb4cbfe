"""Names of function providers: ours, and those that other distributions register as entry points.

    [project.entry-points."rollart.function_backends"]
    nebula = "rollart_nebula:PLUGIN"        # a serverless.providers.plugin.ProviderPlugin

Names are read from the metadata of installed distributions; a plugin's code is imported where its provider is used.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rollart.errors import ProviderError
from rollart.settings.prices import PriceEntry, PriceList, gpu_price_name
from serverless.spec import gpu_type

if TYPE_CHECKING:
    from importlib import metadata

    from serverless.providers.plugin import ListPrice, ProviderPlugin

BUILT_IN = ("local", "aws_lambda", "modal", "http")
"""Provider names as in the ledger and the price list."""

ALIASES: Mapping[str, str] = {"aws": "aws_lambda", "lambda": "aws_lambda"}
"""Other names of providers on the command line."""

GROUP = "rollart.function_backends"

PLUGIN_NAME = r"[a-z][a-z0-9_]{0,63}"

RESERVED = frozenset(
    {
        *BUILT_IN,
        *ALIASES,
        *("backend", "price", "quota", "allow_unsafe", "order_check", "secrets", "pipeline", "scaling"),
    }
)
"""Names that a plugin cannot have: other names of providers, and the keys of `functions` (`ClusterFunctions`, which
imports this module; a test compares them)."""


def installed_plugins() -> Mapping[str, metadata.EntryPoint]:
    """Entry points by provider. A name that is reserved or no lower-case identifier is none."""
    return _installed(tuple(sys.path))


@functools.lru_cache(maxsize=4)
def _installed(path: tuple[str, ...]) -> Mapping[str, metadata.EntryPoint]:
    from importlib import metadata  # late: only a name that is not ours is looked up

    found = sorted(metadata.entry_points(group=GROUP), key=lambda one: one.name)
    return {one.name: one for one in found if one.name not in RESERVED and re.fullmatch(PLUGIN_NAME, one.name)}


def provider_names() -> tuple[str, ...]:
    """Ours first."""
    return (*BUILT_IN, *installed_plugins())


def plugin(name: str) -> ProviderPlugin:
    """The plugin of an installed provider. ProviderError if it cannot be imported or is none."""
    from serverless.providers.plugin import ProviderPlugin  # late: commands that use no plugin need not import it

    entry = installed_plugins()[name]
    source = f"provider '{name}' of {entry.dist.name if entry.dist else entry.value}"
    try:
        found = entry.load()
    except Exception as error:
        raise ProviderError(
            f"{source} cannot be imported: {type(error).__name__}: {error}", remedy="reinstall or remove it"
        ) from None
    if not isinstance(found, ProviderPlugin):
        raise ProviderError(
            f"{source} is a {type(found).__name__} (rule: a serverless.providers.plugin.ProviderPlugin)",
            remedy="ask its author for a version for this rollart",
        )
    return found


def with_plugin_prices(prices: PriceList, providers: Sequence[str]) -> PriceList:
    """The list with prices that plugins among the providers bring, where it has none of that name and unit."""
    known = {(p.name, p.unit) for p in prices.prices}
    listed = [_entry(name, price) for name in providers if name not in BUILT_IN for price in plugin(name).prices]
    more = [entry for entry in listed if (entry.name, entry.unit) not in known]
    return PriceList(currency=prices.currency, prices=[*prices.prices, *more]) if more else prices


def _entry(provider: str, price: ListPrice) -> PriceEntry:
    """A plugin's price, named after the provider, or after its GPU type as runs look it up."""
    name = gpu_price_name(provider, gpu_type(price.gpu)[0]) if price.gpu else provider
    return PriceEntry.model_validate(
        {"name": name, "unit": price.unit, "usd": price.usd, "source": price.source, "date": price.date}
    )
