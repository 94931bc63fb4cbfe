"""Domain profiles measured in a finished run, which `placement.profile` names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from placement.workload import DomainProfile
from rollart.errors import SpecError
from rollart.report.profile import profiles_of


def measured_profiles(directory: Path) -> Sequence[DomainProfile]:
    """Profiles of the run in a directory. SpecError if there is none."""
    if not directory.is_dir():
        raise SpecError(f"placement.profile: {directory} is no run's directory", remedy="give the directory of a run")
    return profiles_of(directory)
