"""Specs from files: YAML, then overrides, then validation. Nothing is looked up and nothing is started here.

An invalid spec raises one SpecError that lists every problem, one per line, as `file:line:column: problem (rule: …)`.
The kinds of specs, their JSON Schemas for editors (`# yaml-language-server: $schema=…`) and `rollart schema`, and the
source positions of a run's specs, for problems that are found after they were read, are here too.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rollart.errors import SpecError, UsageError, did_you_mean
from rollart.settings.cluster import ClusterSpec
from rollart.settings.document import Document, KeyPath, SourcePosition, apply_overrides, read_document
from rollart.settings.faults import FaultPlanSpec, fault_problems
from rollart.settings.functions import settings_parts
from rollart.settings.prices import PriceList, merged_prices
from rollart.settings.providers import with_plugin_prices
from rollart.settings.rules import (
    RuleViolation,
    cluster_problems,
    missing_price,
    price_problems,
    repeated_prices,
    run_problems,
)
from rollart.settings.run import RunSpec
from serverless.spec import VARIABLE, VARIABLE_RULE

CLUSTER_PREFIX = "cluster."
"""Overrides that start with it go to the cluster spec; a run spec has no key of that name."""

MAX_LINES = 50
"""Most problems of a spec in one error."""

UNION_MEMBERS = ("float", "constrained-float", "literal['auto']")
"""Location parts that pydantic adds for a value that is a number or "auto"."""

SpecModel = TypeVar("SpecModel", RunSpec, ClusterSpec, PriceList, FaultPlanSpec)

LayerModel = TypeVar("LayerModel", bound=BaseModel)

KINDS: Mapping[str, type[BaseModel]] = {
    "run": RunSpec,
    "cluster": ClusterSpec,
    "prices": PriceList,
    "faults": FaultPlanSpec,
}
"""Spec models by the name that the command line uses."""


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read a run spec."""
    return _load(path, overrides, RunSpec, run_problems)


def load_cluster(path: str | Path, overrides: Sequence[str] = ()) -> ClusterSpec:
    """Read a cluster spec."""
    base = Path(path).parent
    return _load(path, overrides, ClusterSpec, lambda c: [*cluster_problems(c), *_prices_of_functions(c, base)])


def load_prices(path: str | Path) -> PriceList:
    """Read a price list."""
    return _load(path, (), PriceList, price_problems)


def load_price_changes(path: str | Path) -> PriceList:
    """Read prices that are merged into a list: of a model or a GPU some of the units suffice."""
    return _load(path, (), PriceList, repeated_prices)


def load_faults(path: str | Path, parts: Sequence[str] | None = None, functions: Sequence[str] = ()) -> FaultPlanSpec:
    """Read a fault plan. With the `parts` and `functions` of a run, the names in the plan are checked too."""
    return _load(path, (), FaultPlanSpec, lambda plan: fault_problems(plan, parts, functions))


def price_list(values: Mapping[str, Any], *, where: str) -> PriceList:
    """Prices that were not written as YAML, by the rules of `load_price_changes`. `where` names them in errors."""
    return _validate(Document(where, dict(values)), PriceList, repeated_prices)


def load_file(path: str | Path) -> RunSpec | ClusterSpec | PriceList | FaultPlanSpec:
    """Read any spec. Its kind is the one that shares most keys with it, and a cluster if it has pools."""
    loaders: Mapping[str, Callable[[str | Path], RunSpec | ClusterSpec | PriceList | FaultPlanSpec]] = {
        "run": load_run,
        "cluster": load_cluster,
        "prices": load_prices,
        "faults": load_faults,
    }
    keys = read_document(path).values.keys()
    scores = {kind: len(keys & model.model_fields.keys()) for kind, model in KINDS.items()}
    return loaders["cluster" if "pools" in keys else max(scores, key=lambda kind: scores[kind])](path)


def saved_specs(
    path: str | Path, overrides: Mapping[str, Sequence[str]]
) -> tuple[RunSpec, ClusterSpec, PriceList, str]:
    """The specs that a run's directory keeps (`Resolved.to_yaml`), with overrides of `run` and `cluster`."""
    values = read_document(path).values
    parts: dict[str, Document] = {}
    for part in ("run", "cluster", "prices"):
        if not isinstance(values.get(part), dict):
            raise SpecError(f"{path}: key '{part}' is missing (rule: what `rollart launch` wrote)")
        parts[part] = Document(f"{path}: {part}", values[part])
        apply_overrides(parts[part], overrides.get(part, ()))
    return (
        _validate(parts["run"], RunSpec, run_problems),
        _validate(parts["cluster"], ClusterSpec, cluster_problems),
        _validate(parts["prices"], PriceList, repeated_prices),  # a run goes on with the prices that it began with
        str(values.get("base", ".")),
    )


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides of the run and of the cluster.

    Raises:
        SpecError: an override of the run has a key that only clusters have.
    """
    for override in overrides:
        key = override.partition("=")[0].partition(".")[0]
        if key in ClusterSpec.model_fields and key not in RunSpec.model_fields:
            raise SpecError(
                f"override '{override}': unknown key '{key}' in run (rule: keys of the cluster have the prefix "
                f"'{CLUSTER_PREFIX}'; did you mean '{CLUSTER_PREFIX}{override}'?)"
            )
    for_cluster = [o.removeprefix(CLUSTER_PREFIX) for o in overrides if o.startswith(CLUSTER_PREFIX)]
    return [o for o in overrides if not o.startswith(CLUSTER_PREFIX)], for_cluster


def builtin(relative: str) -> Path:
    """A shipped spec, e.g. `runs/quickstart.yaml` or `clusters/local.yaml`."""
    return Path(__file__).resolve().parent.parent / "configs" / relative


def function_layer_settings(model: type[LayerModel], part: str, given: Mapping[str, Any]) -> LayerModel:
    """Settings at `part` (`functions.pipeline`) that were not validated with a file: those of library callers and
    overrides. SpecError for the first unknown key or invalid value."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        keys = (str(key) for key in first["loc"] if key not in UNION_MEMBERS)
        raise SpecError(value_problem(first, ".".join([part, *keys]))) from None


def json_schema(kind: str) -> dict[str, Any]:
    """JSON Schema (2020-12) of a kind of spec. UsageError for a kind that there is not."""
    if kind not in KINDS:
        raise UsageError(
            f"no schema '{kind}'{did_you_mean(kind, KINDS)}", remedy="ask for run, cluster, prices or faults"
        )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"rollart/{kind}.json",
        **KINDS[kind].model_json_schema(),
    }


@dataclass(frozen=True, slots=True)
class SpecSources:
    """The documents that a run's specs were read from."""

    run: Document
    cluster: Document

    @classmethod
    def files(cls, run: str | Path | None, cluster: str | Path | None, overrides: Sequence[str] = ()) -> SpecSources:
        """The documents of `read_specs`' arguments."""
        found = [
            read_document(builtin(default) if path is None else path)
            for path, default in ((run, "runs/quickstart.yaml"), (cluster, "clusters/local.yaml"))
        ]
        for document, own in zip(found, split_overrides(overrides), strict=True):
            apply_overrides(document, own)
        return cls(*found)

    @classmethod
    def saved(cls, path: str | Path) -> SpecSources:
        """The documents of a run's directory. They have no line numbers, since no user wrote them."""
        return cls(Document(f"{path}: run", {}), Document(f"{path}: cluster", {}))

    def position(self, finding: RuleViolation) -> str:
        """A finding's position as `file:line:column`. Its path begins with `run` or `cluster`."""
        document = self.run if finding.loc[0] == "run" else self.cluster
        return str(document.position(finding.loc[1:], key=finding.key))


def raise_findings(found: Sequence[RuleViolation], where: SpecSources | None = None) -> None:
    """Raise one SpecError for all findings, a line each. Does nothing without findings."""
    if not found:
        return
    positions = ["" if where is None else where.position(one) for one in found]
    first, *rest = [(position, one.message) for position, one in zip(positions, found, strict=True)]
    remedies = list(dict.fromkeys(one.remedy for one in found if one.remedy))
    raise SpecError(
        "\n".join([first[1], *(f"{position}: {message}" if position else message for position, message in rest)]),
        where=first[0],
        remedy=remedies[0] if len(remedies) == 1 else "",
    )


def _load(
    path: str | Path,
    overrides: Sequence[str],
    model: type[SpecModel],
    rules: Callable[[SpecModel], list[RuleViolation]],
) -> SpecModel:
    document = read_document(path)
    apply_overrides(document, overrides)
    return _validate(document, model, rules)


def _validate(
    document: Document, model: type[SpecModel], rules: Callable[[SpecModel], list[RuleViolation]]
) -> SpecModel:
    try:
        spec = model.model_validate(document.values)
    except ValidationError as error:
        raise _spec_error(list(_problems(error, model, document))) from None
    problems = [_LocatedProblem(document.position(p.loc), p.message, p.remedy) for p in rules(spec)]
    if isinstance(spec, ClusterSpec):
        for at, part, values in settings_parts(spec):  # the function layer's own settings
            try:
                part.model_validate(values)
            except ValidationError as error:
                problems += _problems(error, part, document, at=at)
    if problems:
        raise _spec_error(problems)
    return spec


def _prices_of_functions(cluster: ClusterSpec, base: Path) -> Iterator[RuleViolation]:
    """The price file exists, `functions.price` is in the list that this cluster is priced with, and so are the other
    prices that those of `price_list` need."""
    wanted = cluster.functions.price
    path = builtin("prices.yaml") if cluster.prices is None else base / cluster.prices
    if not path.is_file():
        yield RuleViolation(("prices",), f"prices is '{cluster.prices}' (rule: a file; there is no {path})")
    elif wanted is not None or cluster.price_list:
        listed = merged_prices(with_plugin_prices(load_prices(path), cluster.functions.chain), cluster.price_list)
        for entry, needed in listed.incomplete():
            if entry in cluster.price_list:
                yield missing_price(("price_list", cluster.price_list.index(entry), "unit"), entry, needed)
        known = sorted({entry.name for entry in listed.prices if entry.unit != "device-hour"})
        if wanted is not None and wanted not in known:
            rule = f"a provider of the price list{did_you_mean(wanted, known)}"
            yield RuleViolation(("functions", "price"), f"functions.price is '{wanted}' (rule: {rule})")


@dataclass(frozen=True, slots=True)
class _LocatedProblem:
    where: SourcePosition
    message: str
    remedy: str = ""


def _spec_error(lines: Sequence[_LocatedProblem]) -> SpecError:
    """One error for all problems, in file order, at the position of the first."""
    unique = sorted(dict.fromkeys(lines), key=lambda line: (line.where.line, line.where.column))
    first, rest = unique[0], unique[1:MAX_LINES]
    more = [f"and {len(unique) - MAX_LINES:,} more problems"] if len(unique) > MAX_LINES else []
    text = [first.message, *(f"{line.where}: {line.message}" for line in rest), *more]
    remedies = list(dict.fromkeys(line.remedy for line in unique if line.remedy))
    return SpecError("\n".join(text), where=str(first.where), remedy=remedies[0] if len(remedies) == 1 else "")


def _problems(
    error: ValidationError, model: type[BaseModel], document: Document, *, at: KeyPath = ()
) -> Iterator[_LocatedProblem]:
    """One line per value: the errors of all members of a union are joined into one rule. `model` describes the value
    at `at`."""
    top = next((kind for kind, known in KINDS.items() if known is model), "cluster")
    same: dict[tuple[KeyPath, str], list[Any]] = {}
    for each in error.errors(include_url=False):
        loc: KeyPath = (*at, *each["loc"])
        known = each["type"] not in ("extra_forbidden", "missing")
        location = (_document_path(loc, document.values), abbreviated(each["input"])) if known else (loc, each["type"])
        same.setdefault(location, []).append(each)
    for (loc, _), several in same.items():
        if len(several) == 1:
            yield _problem(several[0], model, top, document, at=at)
            continue
        rules = dict.fromkeys(_rule(e["type"], _rule_text(e)) for e in several)
        shown = _shown(_dotted(loc, top), several[0]["input"])
        yield _LocatedProblem(document.position(loc), f"{shown} (rule: {' or '.join(rules)})")


def _problem(error: Any, model: type[BaseModel], top: str, document: Document, *, at: KeyPath = ()) -> _LocatedProblem:
    """A pydantic error as position, value and rule. `model` describes the value at `at`."""
    loc: KeyPath = (*at, *error["loc"])
    if error["type"] == "extra_forbidden":
        parent = _model_at(model, loc[len(at) : -1])
        hint = did_you_mean(str(loc[-1]), parent.model_fields if parent else ())
        within = _dotted(_document_path(loc[:-1], document.values), top)
        keys = "its own keys" if at else f"keys of `rollart schema {top}`"
        return _LocatedProblem(
            document.position(loc, key=True), f"unknown key '{loc[-1]}' in {within} (rule: only {keys}{hint})"
        )
    if error["type"] == "missing":
        within = _dotted(loc[:-1], top)
        return _LocatedProblem(
            document.position(loc[:-1]), f"key '{loc[-1]}' is missing in {within} (rule: it has no default)"
        )
    loc = _document_path(loc, document.values)
    return _LocatedProblem(document.position(loc), value_problem(error, _dotted(loc, top)))


def value_problem(error: Any, name: str) -> str:
    """The value called `name`, and the rule that it breaks."""
    return f"{_shown(name, error['input'])} (rule: {_rule(error['type'], _rule_text(error))})"


def _shown(name: str, value: object) -> str:
    """The value called `name`. In place of the name of a secret it is not shown, nor what follows '=' in a key."""
    if "secrets" in name.split("."):
        return f"{re.sub('=.*', '=…', name)} is a value that is not shown"
    return f"{name} is {abbreviated(value)}"


def _rule_text(error: Any) -> str:
    message: str = error["msg"]
    return message.removeprefix("Input should be ").removeprefix("Value error, ")


def _rule(kind: str, message: str) -> str:
    """Pydantic's message; regular expressions and types are described in words."""
    if kind == "string_pattern_mismatch":
        return next((rule for pattern, rule in _PATTERN_RULES.items() if pattern in message), message)
    return _TYPE_RULES.get(kind, message)


_PATTERN_RULES: Mapping[str, str] = {
    VARIABLE: VARIABLE_RULE,
    "|env:": "file, or env:VAR",
    "(@[": "NAME, NAME@VERSION or NAME@ALIAS of a deployed function, whose name has letters, digits, '_' and '-'",
    r":[A-Za-z_]\w*": "an import path like package.module:attribute",
    "([A-Za-z_][A-Za-z0-9_]*)?$": "the name of an environment variable",
    "secretsmanager": "the name or ARN of a secret, and `:key` for one key of it",
    r":parameter": "the name or ARN of a parameter",
    "!+:": "a type of GPU, and `:2` for two of them",
    "_.:/@-": "letters, digits, '_', '.', ':', '/', '@', '-', starting with a letter or digit",
    "_.-": "letters, digits, '_', '.', '-', starting with a letter or digit",
}
"""The rules of regular expressions, by a part of each that the ones before it do not have."""

_TYPE_RULES: Mapping[str, str] = {
    "model_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "list_type": "a list",
}
"""The rules of types in the terms of YAML."""


def abbreviated(value: object) -> str:
    """A value's `repr`, of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _document_path(loc: KeyPath, values: Any) -> KeyPath:
    """The part of a path that is in the document, without the names of union members that pydantic adds."""
    for i, part in enumerate(loc):
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return loc[:i]
    return loc


def _dotted(loc: KeyPath, top: str) -> str:
    return ".".join(str(part) for part in loc) if loc else top


def _model_at(model: type[BaseModel], loc: KeyPath) -> type[BaseModel] | None:
    """The model that describes the mapping at `loc`."""
    at: Any = model
    for part in loc:
        if typing.get_origin(at) is dict:
            at = typing.get_args(at)[1]
            continue
        if isinstance(part, int):
            at = next(iter(typing.get_args(at)), None)
            continue
        found = _as_model(at)
        if found is None or part not in found.model_fields:
            return None
        at = found.model_fields[part].annotation
    return _as_model(at)


def _as_model(annotation: Any) -> type[BaseModel] | None:
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    options = typing.get_args(annotation) if union else [annotation]
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None
