"""Completion of names in a shell: functions and their versions, runs, providers, domains. No provider is asked.

The names of functions on a provider are those of its last listing, which `remember` keeps below `--root`; those of this
machine are read from there. Only the standard library is imported, with a YAML reader for the domains of a run file,
and the names of providers where they are asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    shell_complete,
)

from rollart.cli.commands import COMPLETE, cli
from rollart.errors import UsageError

if TYPE_CHECKING:
    from serverless.providers.base import DeployedFunction

_LISTED = "listed.json"
"""Names of functions by provider, below `--root`."""

DIGEST = 12
"""Characters of a version for people: commands take any unambiguous prefix."""


class _Bash(BashComplete):
    """Completion of words with `@` and `=`: bash passes `judge@l` as three words, and replaces the part from `@`, or
    after `=`."""

    def get_completion_args(self) -> tuple[list[str], str]:
        words: list[str] = []
        joins = False
        for word in os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]:
            breaks = bool(word) and not word.strip("@=")
            if joins or (breaks and words):
                words[-1] += word
            else:
                words.append(word)
            joins = breaks
        if words[-1].startswith("--"):
            option, given, value = words[-1].partition("=")
            words[-1:] = [option, value] if given else [option]
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        _, at, version = item.value.rpartition("@")
        return f"{item.type},{at}{version}"


add_completion_class(_Bash)


def completion(shell: str) -> None:
    found = get_completion_class(shell)
    assert found is not None, "the choices of the command"
    click.echo(found(cli, {}, "rollart", COMPLETE).source())


def answer(instruction: str) -> int:
    """Answer the request of a shell's completion. Returns the exit code; UsageError for another request."""
    code = 0
    with contextlib.suppress(Exception):  # a file that cannot be read has no names
        code = shell_complete(cli, {}, "rollart", COMPLETE, instruction)
    if code:
        raise UsageError(f"{COMPLETE}={instruction} is no request of a shell", remedy=f"unset {COMPLETE}")
    return code


def remember(root: Path, provider: str, found: Iterable[DeployedFunction], *, everything: bool) -> None:
    """Keep the names of listed functions; `everything`: these are all of the provider. A directory that cannot be
    written is left alone."""
    fresh: dict[str, dict[str, list[str]]] = {}
    for one in found:
        fresh.setdefault(one.function, {})[one.version] = [one.provider_version, *one.aliases]
    with contextlib.suppress(OSError):
        listed = _listed(root)
        known = listed.get(provider, {})
        if everything:
            listed[provider] = {name: {**known.get(name, {}), **versions} for name, versions in fresh.items()}
        else:
            listed[provider] = {**known, **fresh}
        root.mkdir(parents=True, exist_ok=True)
        partial = root / f"{_LISTED}.{os.getpid()}"
        partial.write_text(json.dumps(listed))
        partial.replace(root / _LISTED)


def functions(context: click.Context, incomplete: str) -> Iterator[CompletionItem]:
    """Names of functions; after NAME@ their versions and aliases."""
    known = _functions(context)
    name, at, version = incomplete.partition("@")
    if at:
        yield from (
            CompletionItem(f"{name}@{one}") for one in _versions(known.get(name, {})) if one.startswith(version)
        )
        return
    yield from (CompletionItem(one) for one in sorted(known) if one.startswith(incomplete))


def files(context: click.Context, incomplete: str) -> Iterator[CompletionItem]:
    yield CompletionItem(incomplete, type="file")


def functions_or_files(context: click.Context, incomplete: str) -> Iterator[CompletionItem]:
    """Functions, or files if there are none: bash shows either."""
    found = list(functions(context, incomplete))
    yield from found or [CompletionItem(incomplete, type="file")]


def versions(context: click.Context, incomplete: str) -> Iterator[CompletionItem]:
    """Versions of the function that the command names."""
    given = context.params.get("function") or next(iter(context.args), "")  # an option without its value ends parsing
    known = _functions(context).get(str(given), {})
    yield from (CompletionItem(one) for one in _versions(known) if one.startswith(incomplete))


def providers(context: click.Context, incomplete: str) -> Iterator[CompletionItem]:
    from rollart.settings.providers import installed_plugins  # late: with pydantic

    known = ("local", "aws", "modal", *installed_plugins())
    yield from (CompletionItem(one) for one in known if one.startswith(incomplete))


def runs(context: click.Context, incomplete: str) -> Iterator[CompletionItem]:
    """Names of runs, the latest first."""
    directory = Path(context.params.get("runs_dir") or "runs")
    found = [path for path in directory.glob("*/resolved.yaml") if path.parent.name.startswith(incomplete)]
    for path in sorted(found, key=lambda path: -path.stat().st_mtime_ns):
        yield CompletionItem(path.parent.name)


def specs(context: click.Context, incomplete: str) -> Iterator[CompletionItem]:
    """Run files; after `domains.` the domains of the run file that is given."""
    if not incomplete.startswith("domains."):
        yield CompletionItem(incomplete, type="file")
        return
    import yaml

    for file in (one for one in context.params.get("arguments") or () if "=" not in one):
        for domain in (yaml.safe_load(Path(file).read_text()) or {}).get("domains", ()):
            name = f"domains.{domain['name']}."
            if name.startswith(incomplete):
                yield CompletionItem(name)


def _functions(context: click.Context) -> dict[str, Any]:
    """The functions of the command's provider: versions with their other names."""
    given = str(context.params.get("provider") or "local")
    root = Path(context.params.get("root") or ".rollart/functions")
    if given != "local":
        from rollart.settings.providers import ALIASES  # late: with pydantic

        return dict(_listed(root).get(ALIASES.get(given, given), {}))
    found = {}
    for path in root.glob("deployed/*/state.json"):
        state = json.loads(path.read_text())
        aliases = {state.get("current"): "live", state.get("canary"): "canary"}
        names = {one["version"]: [str(one["number"])] for one in state["versions"]}
        found[path.parent.name] = {v: [*n, *([aliases[v]] if v in aliases else [])] for v, n in names.items()}
    return found


def _versions(names: dict[str, list[str]]) -> list[str]:
    """Aliases, then digests, then the provider's numbers."""
    others = {other for one in names.values() for other in one}
    return [
        *sorted(other for other in others if not other.isdecimal()),
        *(version[:DIGEST] for version in names),
        *sorted((other for other in others if other.isdecimal()), key=int, reverse=True),
    ]


def _listed(root: Path) -> dict[str, dict[str, dict[str, list[str]]]]:
    try:
        found = json.loads((root / _LISTED).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
