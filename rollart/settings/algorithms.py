"""The algorithms of `training.algorithm`: each a set of defaults for switches that can be set one by one. Pure data.

What a spec gives itself stays. Formulas, papers and the differences from other implementations are in docs/training.md
"Algorithms".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Algorithm = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "ppo",
    "topr",
    "kimi",
    "online_dpo",
    "opd",
    "sft",
]


@dataclass(frozen=True, slots=True)
class AlgorithmPreset:
    """Defaults of `training.loss` and of every domain's `advantage`, and of `training.critic` for one that has it."""

    loss: Mapping[str, Any]
    advantage: Mapping[str, Any] = field(default_factory=dict)
    critic: Mapping[str, Any] | None = None


_GROUP_SCALED = {"level": "trajectory", "baseline": "group", "normalize": "group"}
_GROUP_CENTRED = {"level": "trajectory", "baseline": "group", "normalize": "none"}

PRESETS: Mapping[Algorithm, AlgorithmPreset] = {
    "grpo": AlgorithmPreset({"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "sample"}, _GROUP_SCALED),
    "dr_grpo": AlgorithmPreset(
        {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "constant"}, _GROUP_CENTRED
    ),
    "dapo": AlgorithmPreset(
        {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token"}, {**_GROUP_SCALED, "overlong": 0.2}
    ),
    "gspo": AlgorithmPreset(
        {"kind": "ppo", "ratio": "geometric", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sample"},
        _GROUP_SCALED,
    ),
    "cispo": AlgorithmPreset({"kind": "tis", "cap": 5.0, "aggregation": "token"}, _GROUP_SCALED),
    "rloo": AlgorithmPreset(
        {
            "kind": "ppo",
            "ratio": "product",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "aggregation": "sample",
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
        {"level": "trajectory", "baseline": "leave_one_out", "normalize": "none"},
    ),
    "reinforce_pp": AlgorithmPreset(
        {
            "kind": "ppo",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "aggregation": "token",
            "kl": 0.01,
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
        {"level": "token", "gamma": 1.0, "baseline": "none", "normalize": "whiten"},
    ),
    "ppo": AlgorithmPreset(
        {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "token"},
        {"level": "token", "gamma": 1.0, "gae_lambda": 0.95, "baseline": "critic", "normalize": "whiten"},
        critic={"value_clip": None},
    ),
    "topr": AlgorithmPreset(
        {"kind": "topr", "cap": 1.0, "correction_level": "product", "aggregation": "constant"}, _GROUP_CENTRED
    ),
    "kimi": AlgorithmPreset({"kind": "kimi", "tau": 1.0, "aggregation": "constant"}, _GROUP_CENTRED),
    "online_dpo": AlgorithmPreset({"kind": "dpo", "kl": 0.1, "aggregation": "constant", "length": 1}),
    "opd": AlgorithmPreset(
        {
            "kind": "ppo",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "aggregation": "token",
            "reward_factor": 0.0,
            "kl": 1.0,
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
        {"level": "token", "gamma": 0.0, "baseline": "none", "normalize": "none"},
    ),
    "sft": AlgorithmPreset({"kind": "nll", "aggregation": "token"}),
}
"""The algorithms by name. `loss.length` of the constant aggregation is the longest domain's."""


def with_training_defaults(training: Any) -> Any:
    """The values of a `training` mapping, with the loss and the critic of its algorithm where the mapping gives none.
    Other values are returned as they are: their errors are pydantic's."""
    preset = _preset(training)
    if preset is None:
        return training
    filled = dict(training)
    for key, own in (("loss", preset.loss), ("critic", preset.critic)):
        given = training.get(key, {})
        if own is not None and isinstance(given, Mapping):
            filled[key] = {**own, **given}
    return filled


def with_advantage_defaults(training: Any, domain: Any) -> Any:
    """The values of a domain with the advantage of the algorithm of `training`, where the domain gives none."""
    preset = _preset(training)
    if preset is None or not isinstance(domain, Mapping):
        return domain
    advantage = domain.get("advantage", {})
    return {**domain, "advantage": {**preset.advantage, **advantage}} if isinstance(advantage, Mapping) else domain


def changed_switches(training: Any, domains: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Key, value and the algorithm's own value of each switch that a run sets otherwise than its algorithm."""
    preset = _preset(training)
    if preset is None:
        return
    parts = [("training.loss", training.loss, preset.loss)]
    if training.critic is not None and preset.critic is not None:
        parts.append(("training.critic", training.critic, preset.critic))
    parts += [(f"domains.{i}.advantage", one.advantage, preset.advantage) for i, one in enumerate(domains)]
    for where, given, own in parts:
        for key, value in own.items():
            if (found := getattr(given, key)) != value:
                yield f"{where}.{key}", found, value


def _preset(training: Any) -> AlgorithmPreset | None:
    name = training.get("algorithm") if isinstance(training, Mapping) else getattr(training, "algorithm", None)
    return PRESETS.get(name) if isinstance(name, str) else None  # type: ignore[call-overload]
