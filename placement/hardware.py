"""The hardware catalogue: the figures of each device type, each with its source.

The data is `hardware.toml` beside this module. A figure that no source states is absent (None), never estimated. Names
are keys only: no decision in `placement` depends on them.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from placement.types import FIGURES, Device


def catalogue() -> Mapping[str, Device]:
    """Every known type by its own name (aliases are not listed). Read once; read-only."""
    return _load()[0]


def canonical(name: str) -> str:
    """The catalogue's name for a type: "A100" is "A100-80". ValueError, with a suggestion, if it is not known."""
    entries, aliases = _load()
    found = aliases.get(name, name)
    if found in entries:
        return found
    by_lower = {known.lower(): known for known in (*entries, *aliases)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    hint = f": did you mean '{by_lower[near[0]]}'?" if near else ""
    raise ValueError(
        f"device '{name}' is not in the catalogue{hint} (rule: one of {', '.join(entries)}, or a type of your own with "
        "its figures)"
    )


def device_name(name: str) -> str:
    """The catalogue's name for a type; an unknown name is returned unchanged."""
    try:
        return canonical(name)
    except ValueError:
        return name


def device(name: str) -> Device:
    """A known type by name or alias, under the catalogue's name. ValueError, with a suggestion, if it is not known."""
    return catalogue()[canonical(name)]


def override(name: str, *, base: str | None = None, source: str, **figures: float | str | None) -> Device:
    """A user-defined device, or a known one with other figures. It starts from `base`, else from the catalogue's type
    of that name if one exists, else from no figures. `figures` are fields of `Device`, `generation` among them; None
    says that a figure is not known. `source` names their origin. ValueError names a figure that is not a finite number
    above 0.
    """
    entries, aliases = _load()
    if not source.strip():
        raise ValueError(f"device {name}: source is {source!r} (rule: say who states the figures)")
    start = canonical(base) if base is not None else aliases.get(name, name)
    known = entries.get(start, Device(name))
    if any(getattr(known, figure) is not None and figure not in figures for figure in FIGURES):
        source = f"{source}; the rest as {start}: {known.source}"
    return replace(known, name=name, source=source, **figures)  # type: ignore[arg-type]  # figures are checked there


@cache
def _load() -> tuple[Mapping[str, Device], Mapping[str, str]]:
    """The catalogue and the aliases. An error here is ours: the file is part of the package, and tests read it."""
    data = tomllib.loads(files("placement").joinpath("hardware.toml").read_text(encoding="utf-8"))
    entries = {}
    for name, figures in data["devices"].items():
        generation = figures.pop("generation")
        texts = dict.fromkeys(data["sources"][figure["s"]]["text"] for figure in figures.values())
        stated = {key: figure["v"] for key, figure in figures.items()}
        entries[name] = Device(name, generation=generation, source="; ".join(texts), **stated)
    return MappingProxyType(entries), MappingProxyType(dict(data["aliases"]))
