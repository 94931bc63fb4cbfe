"""Predictions for a machine that was calibrated as a whole, which include the CPU time that its parts share."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from placement.types import Plan
from placement.workload import DomainProfile
from rollart.compose.calibrate import Machine
from rollart.compose.play import profile_by_play
from rollart.compose.predict import predict
from rollart.errors import SpecError
from rollart.report.tables import Table, TableColumn
from rollart.spec.resolve import Resolved, Specs
from rollart.spec.rules import quotas
from rollart.spec.work import profiles_of


def machine_of(specs: Specs) -> Machine | None:
    """The machine among the cluster's calibration files, if one of them is of a whole machine."""
    for name in specs.cluster.calibration:
        path = Path(name)
        try:
            data = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else {}
        except (OSError, ValueError):
            continue  # `spec.planning` reads it as well, and reports the error
        if isinstance(data, dict) and "update_s" in data:
            try:
                return Machine.from_dict(data)
            except ValueError as error:
                raise SpecError(
                    f"calibration '{name}': {error}", remedy="write it anew with `rollart calibrate`"
                ) from None
    return None


def predict_on_machine(resolved: Resolved, specs: Specs, machine: Machine) -> tuple[Resolved, Table]:
    """The plan at the rate that this machine should reach, and the CPU time behind it."""
    profiles = profiles_of(specs.run, resolved.quotas, specs.measured)
    # The machine's model includes functions and environments, so it takes the measured domains, not the given profiles.
    bare = specs.run.model_copy(update={"domains": [d.model_copy(update={"profile": None}) for d in specs.run.domains]})
    prediction = predict(replace(resolved, run=bare), profiles, machine)
    found = replace(prediction.placement, rate=prediction.rate, binds=(prediction.binds,))
    plan = replace(resolved.plan, placement=found, rates={"trajectories": prediction.rate})
    columns = (TableColumn("part"), TableColumn("cpu_s_per_trajectory", "number"))
    table = Table("cpu", "CPU time of a trained trajectory", columns, tuple(prediction.cpu.items()))
    notes = tuple(note for note in resolved.notes if not note.startswith("no prediction"))
    return replace(resolved, plan=plan, problem=None, notes=notes), table


def played_profiles(specs: Specs) -> tuple[DomainProfile, ...]:
    """Profiles measured by playing the environments without a policy, for domains without a profile."""
    missing: Sequence[str] = [d.name for d in specs.run.domains if d.profile is None]
    known = {profile.name for profile in specs.measured}
    if all(name in known for name in missing):
        return specs.measured
    nowhere = Plan((), {}, 0.0, "")
    bare = Resolved(specs.run, specs.cluster, nowhere, specs.prices, quotas(specs.run), {}, specs.base)
    with tempfile.TemporaryDirectory(prefix="rollart-play-") as directory:
        found = asyncio.run(profile_by_play(bare, Path(directory)))
    return (*specs.measured, *(p for p in found if p.name not in known))
