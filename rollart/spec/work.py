"""The run spec as values of `placement`: domain profiles, training, and hardware affinity."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from placement.architecture import DecoderShape
from placement.constants import TrainingConstants
from placement.hardware import catalogue
from placement.training import adapter_parameters
from placement.types import Pool
from placement.workload import DomainProfile, EnvironmentCost, Quantity, RewardCost, TrainingWork
from rollart.errors import SpecError, one_line
from rollart.foreign import UserCodeGuard, guard
from rollart.spec.cluster import ClusterSpec
from rollart.spec.fleet import device_name
from rollart.spec.profile import ProfileSpec, QuantitySpec
from rollart.spec.run import RunSpec
from rollart.spec.run_parts import DomainSpec
from rollart.spec.suggest import did_you_mean

__all__ = ["ASSUMED", "affinity_of", "initial_config", "model_config", "model_name", "profiles_of", "train_of"]

ASSUMED = "assumed"
"""Source of a profile that is assumed, not given: every trajectory is as long as the spec allows."""


def profiles_of(
    run: RunSpec, quotas: Mapping[str, int], measured: Sequence[DomainProfile] = ()
) -> tuple[DomainProfile, ...]:
    """The work of each domain: as given, else as measured, else as long as its bounds allow (`source` assumed).

    A domain's weight is its quota in the batch, whatever the mix of the run in which it was measured.
    """
    known = {profile.name: profile for profile in measured}
    profiles = []
    for domain in run.domains:
        weight = float(quotas[domain.name])
        try:
            if domain.profile is not None:
                profiles.append(_given(domain, domain.profile, weight))
            elif domain.name in known:
                profiles.append(replace(known[domain.name], weight=weight, max_turns=domain.max_turns))
            else:
                profiles.append(_assumed(domain, run.model.context, weight))
        except ValueError as error:
            raise SpecError(str(error), remedy=f"mend the profile of domain '{domain.name}'") from None
    return tuple(profiles)


def train_of(
    run: RunSpec,
    cluster: ClusterSpec,
    shape: DecoderShape,
    pool: str | None,
    devices: int | None,
    calibrated: TrainingConstants | None = None,
) -> TrainingWork:
    """Training as the placer sees it, fixed to `pool` and `devices` where given."""
    spec, training = run.placement.train, run.training
    constants = calibrated or TrainingConstants()
    lora, checkpointing = training.lora, cluster.trainer.activation_checkpointing
    return TrainingWork(
        batch=run.batch.trajectories,
        staleness=run.staleness,
        epochs=training.epochs,
        pool=pool,
        devices=devices,
        bytes_per_parameter=spec.bytes_per_parameter,
        trained_parameters=None if lora is None else adapter_parameters(shape, lora.rank, tuple(lora.targets)),
        frozen_bytes_per_parameter=spec.frozen_bytes_per_parameter,
        sequence=spec.sequence or run.model.context,
        microbatch_tokens=training.max_tokens_per_microbatch,
        minibatches=training.minibatches,
        recompute=True if spec.recompute is None and checkpointing else spec.recompute,
        split=spec.split,
        constants=constants if spec.mfu is None else replace(constants, mfu=spec.mfu),
        seconds_per_token=spec.seconds_per_token,
        seconds_per_step=spec.seconds_per_step,
    )


def affinity_of(
    run: RunSpec, pools: Sequence[Pool], usable: Mapping[str, str | None]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """`hw_affinity` as pools by domain, and a note for each domain that had to fall back.

    A name is a pool's or a device type's. A device type that this cluster lacks, or whose pools cannot serve the model
    (`usable`: the reason by pool, None if it can), leaves the domain to any pool, as RollArt does (§4.1). SpecError for
    a name that is neither, since that is a typing error.
    """
    found: dict[str, tuple[str, ...]] = {}
    notes = []
    for domain in run.domains:
        tag = domain.tag or domain.name
        wanted = run.hw_affinity.get(tag, run.hw_affinity.get("default"))
        if wanted is None:
            continue
        named = _pools_named(wanted, pools)
        if not named and device_name(wanted) not in catalogue():
            names = [*(p.name for p in pools), *dict.fromkeys(p.device.name for p in pools), *catalogue()]
            raise SpecError(
                f"hw_affinity: '{tag}' prefers '{wanted}' (rule: a pool or a device type{did_you_mean(wanted, names)})"
            )
        able = tuple(name for name in named if usable[name] is None)
        if able:
            found[domain.name] = able
            continue
        reason = usable[named[0]] if named else "the cluster has none"
        notes.append(f"hw_affinity: {domain.name} prefers {wanted}, but {reason}: any pool may take it")
    return found, tuple(notes)


def model_config(run: RunSpec, base: str) -> Mapping[str, object]:
    """The `config.json` that the plan is computed for. SpecError, naming the key, if it cannot be read."""
    model = run.model
    if isinstance(model.config, str):
        return _config_file(Path(base) / model.config, "model.config")
    if model.config is not None:
        return model.config
    if model.path is not None:
        return _config_file(Path(base) / model.path, "model.path")
    assert model.init is not None, "the rules of the run spec want one of them"
    return initial_config(model.init, base)


def model_name(run: RunSpec) -> str:
    """The model's name in calibrations and reports: the directory of its config.json, or the source of the config."""
    model = run.model
    path = model.config if isinstance(model.config, str) else model.path
    if path is not None and not isinstance(model.config, dict):
        return Path(path).parent.name or run.name if Path(path).suffix == ".json" else Path(path).name
    given = model.config if isinstance(model.config, dict) else model.init
    if isinstance(given, str):
        return given
    return str((given or {}).get("_name_or_path") or run.name)


def _given(domain: DomainSpec, spec: ProfileSpec, weight: float) -> DomainProfile:
    environment, reward = spec.environment, spec.reward
    return DomainProfile(
        name=domain.name,
        turns=_quantity(spec.turns),
        new_tokens=_quantity(spec.new_tokens),
        output_tokens=_quantity(spec.output_tokens),
        weight=weight,
        first_tokens=None if spec.first_tokens is None else _quantity(spec.first_tokens),
        shared_prefix=spec.shared_prefix,
        environment=EnvironmentCost(environment.wait_s, environment.core_s, environment.reset_s),
        reward=None if reward is None else RewardCost(**reward.model_dump()),
        max_turns=domain.max_turns,
        source="given",
    )


def _assumed(domain: DomainSpec, context: int, weight: float) -> DomainProfile:
    """Every turn generates `max_tokens`, and observations fill the context: an upper bound of real trajectories."""
    output = domain.max_tokens
    turns = max(1, min(domain.max_turns, context // (output + 1)))
    new = max(1.0, context / turns - output)
    return DomainProfile(
        name=domain.name,
        turns=Quantity(float(turns)),
        new_tokens=Quantity(new),
        output_tokens=Quantity(float(output)),
        weight=weight,
        max_turns=domain.max_turns,
        source=ASSUMED,
    )


def _quantity(spec: QuantitySpec) -> Quantity:
    return Quantity(spec.mean, spec.p50, spec.p90)


def _pools_named(wanted: str, pools: Sequence[Pool]) -> tuple[str, ...]:
    if any(p.name == wanted for p in pools):
        return (wanted,)
    return tuple(p.name for p in pools if p.device.name == device_name(wanted))


def _config_file(path: Path, key: str) -> Mapping[str, object]:
    file = path if path.suffix == ".json" else path / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            f"{key}: {file} cannot be read: {error.strerror}",
            remedy="give model.config a config.json, as a file or a mapping, to plan without the weights",
        ) from None
    except ValueError as error:
        raise SpecError(f"{key}: {file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise SpecError(f"{key}: {file} holds no mapping (rule: a Hugging Face config.json)")
    return found


@guard
def initial_config(init: Mapping[str, Any] | str, base: str) -> dict[str, Any]:
    """`model.init`: the configuration, or the return value of `package.module:function`; the run file's directory is
    importable meanwhile, as in a run. SpecError if there is no configuration."""
    if not isinstance(init, str):
        return dict(init)
    module, _, name = init.partition(":")
    added = base not in sys.path
    if added:
        sys.path.insert(0, base)
    try:
        with UserCodeGuard():
            found: Any = getattr(importlib.import_module(module), name)()
    except Exception as error:  # a user's module may raise any exception
        raise SpecError(f"model.init '{init}' gives no configuration: {one_line(error, 500)}") from None
    finally:
        if added:
            sys.path.remove(base)
    if not isinstance(found, dict):
        raise SpecError(f"model.init '{init}' returned {type(found).__name__} (rule: a mapping, as in config.json)")
    return found
