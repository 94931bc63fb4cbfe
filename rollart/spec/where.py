"""Source positions of a run's specs, for problems that are found after the specs were read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollart.errors import SpecError
from rollart.spec.document import Document, KeyPath, read_document
from rollart.spec.load import builtin, split_overrides
from rollart.spec.overrides import apply_overrides

__all__ = ["SpecFinding", "SpecSources", "raise_findings"]


@dataclass(frozen=True, slots=True)
class SpecFinding:
    """A problem in a spec. `loc` begins with `run` or `cluster`; `key`: the key is wrong, not its value."""

    loc: KeyPath
    message: str
    remedy: str = ""
    key: bool = False


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

    def position(self, finding: SpecFinding) -> str:
        """A finding's position as `file:line:column`."""
        document = self.run if finding.loc[0] == "run" else self.cluster
        return str(document.position(finding.loc[1:], key=finding.key))


def raise_findings(found: Sequence[SpecFinding], where: SpecSources | None = None) -> None:
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
