"""From rewards to advantages, on arrays: credit units, discounted returns, baselines, scaling.

Notation. A sample's sampled tokens fall into *credit units* k = 0, 1, …: each token (`token`), all sampled tokens of
a turn (`turn`), or all of the sample (`trajectory`). r_k is the sum of the rewards paid at the unit's tokens. The *set*
of a sample is its domain's part of the batch (`baseline: domain`) or its group (`baseline: group`).

    return-to-go   G_k = Σ_{j ≥ k} γ^{j−k} r_j                                   (Sutton & Barto 2018, §3.3)
    critic         Â_k = Σ_{j ≥ k} (γλ)^{j−k} δ_j,  δ_k = r_k + γ V_{k+1} − V_k (GAE, arXiv:1506.02438, eq. 16), V_k the
                         critic's value at the unit's first token, and 0 after the last unit; `baseline: critic`
    baseline       b_k at level trajectory: the mean of G over the set, the sample included, as GRPO has it
                         (arXiv:2402.03300, eq. 3), or without it (`leave_one_out`: RLOO, arXiv:2402.14740); at
                         level turn or token: the mean of G_k over the *other* samples of
                         the set that reach unit k, and if none does, over all others of G at their last unit
    centred        A_k = G_k − b_k                                               (b_k = 0 with `baseline: none`), or Â_k
    normalize      A_k / s; s = the sample standard deviation (n − 1, as in TRL and verl) of the centred values over the
                         units of the group (`group`) or of the domain in the batch (`batch`), or 1 (`none`);
                         `whiten`: (A_k − m)/s, m and s over the domain in the batch (REINFORCE++, arXiv:2501.03262)

At level turn and token the baseline leaves the sample out because sets differ from unit to unit. The mean of the n_k
samples that reach unit k, the sample included, shrinks its advantage by (n_k − 1) / n_k: by a half where two reach
it, to nothing where one does. At level trajectory that factor is one constant for the whole set. Without the sample
itself b_k depends on nothing that the sample does from unit k on, in either case, so that it leaves the policy gradient
unbiased (Williams 1992; Kool et al. 2019). A sample that is alone in its set has no baseline and the advantage 0.

Every token of a unit gets the unit's advantage. Rewards at tokens that were not sampled are ignored: the contract of
`TrainSample` pays a turn at its last action token. Turn-level credit: arXiv:2505.11821.

`overlong` o, before all of it: with n sampled tokens of at most L, the last one's reward falls by
min(1, max(0, (n − (1 − o) L) / (o L))), the soft punishment of DAPO (arXiv:2503.14476, eq. 13).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from rollart.settings.training import AdvantageSpec, CreditSpec
from rollart.train.batch import BoolArray, FloatArray, IntArray, TrainingBatch, select_samples

MIN_STD = 1e-6
"""A smaller standard deviation counts as none: dividing rounding noise by it would invent a signal."""


def batch_advantages(
    batch: TrainingBatch, domains: Mapping[str, CreditSpec], values: FloatArray | None = None
) -> FloatArray:
    """Advantage of every loss token [N]. `values` [N]: the critic's, where it is a baseline. `ValueError` for a domain
    that is not configured."""
    batch = punish_overlong(batch, domains)
    out = np.zeros(len(batch.loss), np.float64)
    for name, pick in _by_domain(batch, domains):
        config = domains[name].advantage
        value, units = domain_advantages(config, batch, pick, values)
        out[pick] = normalized(config, value, units)
    return out


def value_targets(batch: TrainingBatch, domains: Mapping[str, CreditSpec], values: FloatArray) -> FloatArray:
    """What the critic's value of every loss token [N] is to become: Â_k + V_k of its unit; NaN where the critic is not
    the baseline."""
    batch = punish_overlong(batch, domains)
    out = np.full(len(batch.loss), np.nan)
    for name, pick in _by_domain(batch, domains):
        config = domains[name].advantage
        if config.baseline == "critic":
            unit = credit_units(config.level, batch.loss.sample[pick], batch.turn[batch.loss.position[pick]])
            estimate, _ = domain_advantages(config, batch, pick, values)
            out[pick] = estimate + values[pick][_unit_starts(batch.loss.sample[pick], unit)]
    return out


def punish_overlong(batch: TrainingBatch, domains: Mapping[str, CreditSpec]) -> TrainingBatch:
    """The batch with the rewards of `overlong`; the batch itself if no domain has it."""
    shares = [domains[name].advantage.overlong if name in domains else 0.0 for name in batch.domains]
    if not any(shares):
        return batch
    most = np.array([(domains[name].max_length or 1) if name in domains else 1 for name in batch.domains])
    share, length = np.array(shares)[batch.domain], most[batch.domain]
    size = np.diff(batch.loss.first)
    punished = np.flatnonzero((share > 0) & (size > 0))
    over = (size - (1.0 - share) * length)[punished] / (share * length)[punished]
    rewards = batch.rewards.copy()
    rewards[batch.loss.position[batch.loss.first[1:][punished] - 1]] -= np.clip(over, 0.0, 1.0)
    return replace(batch, rewards=rewards)


def group_advantages(batch: TrainingBatch, domains: Mapping[str, CreditSpec], *, by_id: bool) -> FloatArray:
    """Advantage of every token [T] of whole groups before `normalize: batch`, 0.0 for tokens without loss: the part
    that does not depend on the rest of the batch. `by_id`: add up samples of a group in the order of their ids, as a
    streamed step does. `ValueError` for a domain whose baseline is of the whole batch or of the step's critic."""
    batch = punish_overlong(batch, domains)
    out = np.zeros(len(batch.tokens), np.float64)
    for name, _ in _by_domain(batch, domains):
        if domains[name].advantage.baseline in ("domain", "critic"):
            raise ValueError(f"the advantages of domain {name!r} are known only in the step, with the whole batch")
    order = sorted(range(len(batch)), key=batch.ids.__getitem__) if by_id else range(len(batch))
    for number in np.unique(batch.group):
        rows = np.array([s for s in order if batch.group[s] == number], np.int64)
        group = select_samples(batch, rows)
        value = np.zeros(len(group.tokens), np.float64)
        for name, pick in _by_domain(group, domains):
            value[group.loss.position[pick]], _ = domain_advantages(domains[name].advantage, group, pick)
        for n, s in enumerate(rows):
            out[batch.offsets[s] : batch.offsets[s + 1]] = value[group.offsets[n] : group.offsets[n + 1]]
    return out


def domain_advantages(
    config: AdvantageSpec, batch: TrainingBatch, pick: IntArray, values: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Advantages before `normalize: batch` of some loss tokens [N] of one domain (whole samples), and of their credit
    units [U]; computed, or taken from the batch if it contains them. `values`: the critic's, of all loss tokens."""
    sample, at = batch.loss.sample[pick], batch.loss.position[pick]
    if batch.advantage is None:
        return centred_advantages(
            config,
            sample=sample,
            turn=batch.turn[at],
            rewards=batch.rewards[at],
            group=batch.group,
            values=None if values is None else values[pick],
        )
    value = batch.advantage[at]
    unit = credit_units(config.level, sample, batch.turn[at])
    _, first = np.unique(np.stack((sample, unit)), axis=1, return_index=True)
    return value, value[first]


def _by_domain(batch: TrainingBatch, domains: Mapping[str, CreditSpec]) -> Iterator[tuple[str, IntArray]]:
    """Domains with loss, with their loss tokens."""
    owner = batch.loss.sample
    for index, name in enumerate(batch.domains):
        domain_credit(domains, name)
        pick = np.flatnonzero(batch.domain[owner] == index)
        if len(pick):
            yield name, pick


def advantages(
    config: AdvantageSpec, *, sample: IntArray, turn: IntArray, rewards: FloatArray, group: IntArray
) -> FloatArray:
    """Advantages [N] of one domain's loss tokens. `sample` [N] ascends; `group` is indexed by sample."""
    picked, units = centred_advantages(config, sample=sample, turn=turn, rewards=rewards, group=group)
    return normalized(config, picked, units)


def normalized(config: AdvantageSpec, value: FloatArray, units: FloatArray) -> FloatArray:
    """Centred advantages [N] after the part of `normalize` that needs the whole batch, whose units are `units` [U]."""
    if config.normalize == "whiten":
        value = value - units.mean()
    return value / normalisation_divisor(units) if config.normalize in ("batch", "whiten") else value


def domain_credit(domains: Mapping[str, CreditSpec], name: str) -> CreditSpec:
    """The domain's settings. `ValueError` for a domain that is not configured."""
    if name not in domains:
        listed = ", ".join(sorted(domains)) or "none"
        raise ValueError(f"domain {name!r} is not configured, the trainer knows {listed}")
    return domains[name]


def normalisation_divisor(units: FloatArray) -> float:
    """The divisor of `normalize`: the sample standard deviation of credit units [U], or 1 if that is negligible."""
    std = float(units.std(ddof=1)) if len(units) > 1 else 0.0
    return std if std > MIN_STD else 1.0


def centred_advantages(
    config: AdvantageSpec,
    *,
    sample: IntArray,
    turn: IntArray,
    rewards: FloatArray,
    group: IntArray,
    values: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Advantages before `normalize: batch` of each loss token [N] and of each credit unit [U]. `values` [N]: the
    critic's."""
    unit = credit_units(config.level, sample, turn)
    present, row = np.unique(sample, return_inverse=True)
    reward = np.zeros((len(present), int(unit.max()) + 1), np.float64)
    reached = np.zeros(reward.shape, np.bool_)
    np.add.at(reward, (row, unit), rewards)
    reached[row, unit] = True
    if config.baseline == "critic":
        assert values is not None, "the trainer has a critic"
        before = np.zeros(reward.shape)
        before[row, unit] = values[_unit_starts(sample, unit)]
        value = returns_to_go(temporal_differences(reward, before, config.gamma), config.gamma * config.gae_lambda)
        return value[row, unit], value[reached]
    value = returns_to_go(reward, config.gamma)
    if config.baseline != "none":
        keys = np.zeros(len(present), np.int64) if config.baseline == "domain" else group[present]
        _, index = np.unique(keys, return_inverse=True)
        whole = config.level == "trajectory" and config.baseline != "leave_one_out"
        value = value - (_mean(value, index) if whole else _mean_of_others(value, reached, index))
        if config.normalize == "group":
            for members in (index == number for number in range(int(index.max()) + 1)):
                value[members] /= normalisation_divisor(value[members][reached[members]])
    picked: FloatArray = value[row, unit]
    return picked, value[reached]


def credit_units(level: str, sample: IntArray, turn: IntArray) -> IntArray:
    """The unit of each loss token within its sample [N], counted from 0. `sample` [N] ascends."""
    count = len(sample)
    if level == "trajectory" or count == 0:
        return np.zeros(count, np.int64)
    begins = np.ones(count, np.bool_)
    begins[1:] = sample[1:] != sample[:-1]
    starts = np.flatnonzero(begins)
    spans = np.diff(np.append(starts, count))
    if level == "token":
        return np.arange(count) - np.repeat(starts, spans)
    if level != "turn":
        raise ValueError(f"credit level {level!r} is not one of token, turn, trajectory")
    changes = np.zeros(count, np.int64)
    changes[1:] = (turn[1:] != turn[:-1]) & ~begins[1:]
    running: IntArray = np.cumsum(changes)
    return running - np.repeat(running[starts], spans)


def returns_to_go(rewards: FloatArray, gamma: float) -> FloatArray:
    """G_k = r_k + γ G_{k+1} along the last axis. [samples, units] -> [samples, units]."""
    out = rewards.astype(np.float64, copy=True)
    for k in range(out.shape[1] - 2, -1, -1):
        out[:, k] += gamma * out[:, k + 1]
    return out


def temporal_differences(rewards: FloatArray, values: FloatArray, gamma: float) -> FloatArray:
    """δ_k = r_k + γ V_{k+1} − V_k along the last axis, V = 0 after it. [samples, units] -> [samples, units]."""
    out = rewards - values
    out[:, :-1] += gamma * values[:, 1:]
    return out


def _unit_starts(sample: IntArray, unit: IntArray) -> IntArray:
    """The index of the first loss token of each token's unit [N]."""
    begins = np.ones(len(sample), np.bool_)
    begins[1:] = (sample[1:] != sample[:-1]) | (unit[1:] != unit[:-1])
    first: IntArray = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    return first


def _mean(value: FloatArray, index: IntArray) -> FloatArray:
    """Mean over the rows with equal `index` [samples]. [samples, 1] -> [samples, 1]."""
    return (np.bincount(index, value[:, 0]) / np.bincount(index))[index, None]


def _mean_of_others(value: FloatArray, reached: BoolArray, index: IntArray) -> FloatArray:
    """For each unit of a row, the mean over the *other* rows with equal `index` [samples] that reach it; if there are
    none, the mean of all others at their last unit; for a single row its own value. All [samples, units]."""
    shape = (int(index.max()) + 1, value.shape[1])
    count, total = np.zeros(shape), np.zeros(shape)
    np.add.at(count, index, reached.astype(np.float64))
    np.add.at(total, index, np.where(reached, value, 0.0))
    others = count[index] - reached
    last = value[np.arange(len(value)), reached.shape[1] - 1 - np.argmax(reached[:, ::-1], axis=1)]
    members = np.bincount(index)[index]
    ended = (np.bincount(index, last)[index] - last) / np.maximum(members - 1, 1)
    beyond = np.where(members[:, None] > 1, ended[:, None], value)
    return np.where(others > 0, (total[index] - np.where(reached, value, 0.0)) / np.maximum(others, 1.0), beyond)
