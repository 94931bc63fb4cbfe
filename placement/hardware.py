"""The hardware catalogue: the figures of each device type, each with its source.

The data is `hardware.toml` beside this module. A figure that no source states is absent (None), never estimated. Names
are keys only: no decision in `placement` depends on them.
"""

from __future__ import annotations

import datetime as dt
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from placement.types import FIGURES, Device

_MAX_FIGURE = 1e15
"""An upper limit of any figure in these units."""


@dataclass(frozen=True, slots=True)
class FigureSource:
    """The source of a figure and the day on which it was read."""

    text: str
    date: dt.date


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A device and the source of each figure that it states."""

    device: Device
    sources: Mapping[str, FigureSource]


def catalogue() -> Mapping[str, CatalogueEntry]:
    """Every known type by its own name (aliases are not listed). Read once; read-only."""
    return _load()[0]


def canonical(name: str) -> str:
    """The catalogue's name for a type: "A100" is "A100-80". ValueError, with a suggestion, if it is not known."""
    entries, aliases = _load()
    found = aliases.get(name, name)
    if found not in entries:
        names = [*entries, *aliases]
        raise ValueError(
            f"device '{name}' is not in the catalogue{_suggest(name, names)} (rule: one of {', '.join(entries)}, "
            "or a type of your own with its figures)"
        )
    return found


def device_name(name: str) -> str:
    """The catalogue's name for a type; an unknown name is returned unchanged."""
    try:
        return canonical(name)
    except ValueError:
        return name


def device(name: str) -> Device:
    """A known type by name or alias, under the catalogue's name. ValueError, with a suggestion, if it is not known."""
    return catalogue()[canonical(name)].device


def override(name: str, *, base: str | None = None, source: str, **figures: float | str | None) -> Device:
    """A user-defined device, or a known one with other figures. It starts from `base`, else from the catalogue's type
    of that name if one exists, else from no figures. `figures` are fields of `Device`, `generation` among them; None
    says that a figure is not known. `source` names their origin. ValueError names a figure that is unknown, not a
    finite number or not above 0.
    """
    entries, aliases = _load()
    if not name.strip():
        raise ValueError(f"device name is {name!r} (rule: not empty)")
    if not source.strip():
        raise ValueError(f"device {name}: source is {source!r} (rule: say who states the figures)")
    start = canonical(base) if base is not None else aliases.get(name, name)
    known = entries[start].device if start in entries else Device(name)
    stated: dict[str, float | None] = {figure: getattr(known, figure) for figure in FIGURES}
    generation = known.generation
    for figure, value in figures.items():
        if figure == "generation":
            generation = _generation(name, value)
        elif figure in stated:
            stated[figure] = None if value is None else _figure(name, figure, value)
        else:
            rule = f"rule: one of generation, {', '.join(FIGURES)}"
            raise ValueError(f"device {name}: {figure} is no figure{_suggest(figure, FIGURES)} ({rule})")
    rest = any(v is not None and k not in figures for k, v in stated.items())
    text = f"{source}; the rest as {start}: {known.source}" if rest else source
    return Device(name, generation=generation, source=text, **stated)  # type: ignore[arg-type]  # checked above


def _suggest(name: str, names: Iterable[str]) -> str:
    """`: did you mean 'H100'?`, or nothing. Case does not count."""
    by_lower = {n.lower(): n for n in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f": did you mean '{by_lower[near[0]]}'?" if near else ""


def _figure(name: str, figure: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_FIGURE:
        raise ValueError(f"device {name}: {figure} is {value!r} (rule: a finite number above 0, or left out)")
    if figure == "devices_per_host":
        if value != int(value):
            raise ValueError(f"device {name}: {figure} is {value!r} (rule: a whole number)")
        return int(value)
    return value


def _generation(name: str, value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"device {name}: generation is {value!r} (rule: a word, like hopper)")
    return value


@cache
def _load() -> tuple[Mapping[str, CatalogueEntry], Mapping[str, str]]:
    """The catalogue and the aliases. An error here is ours: the file is part of the package, and tests read it."""
    data = tomllib.loads(files("placement").joinpath("hardware.toml").read_text(encoding="utf-8"))
    known = {key: FigureSource(text=s["text"], date=s["date"]) for key, s in data["sources"].items()}
    entries = {}
    for name, figures in data["devices"].items():
        stated = {k: _figure(name, k, v["v"]) for k, v in figures.items() if k != "generation"}
        sources = {k: known[v["s"]] for k, v in figures.items() if k != "generation"}
        text = "; ".join(dict.fromkeys(s.text for s in sources.values()))
        made = Device(name, generation=figures["generation"], source=text, **stated)  # type: ignore[arg-type]
        entries[name] = CatalogueEntry(made, MappingProxyType(sources))
    return MappingProxyType(entries), MappingProxyType(dict(data["aliases"]))
