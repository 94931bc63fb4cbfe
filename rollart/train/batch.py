"""Samples as flat arrays: one row of numbers per token, all samples in a row. No per-token Python anywhere after this.

Wire format (msgpack map; the encoder is `rollart.adapters.trainers.http`), little-endian packed arrays as bytes,
S samples, T tokens in total:

    ids       list[str]   S     for error messages
    domains   list[str]         table;  domain  int32[S]  indexes it
    group     int32[S]          equal numbers are one group
    lengths   int32[S]
    score     float64[S]
    tokens    int32[T]    mask uint8[T]   logprobs float32[T]   versions int32[T]   turn int32[T]   rewards float64[T]
    sets      list[list[int]]   the distinct legal sets;  legal  int32[T]  is 1 + index into it, 0 = unrestricted
    reference, advantage  float64[T]   columns that were filled before; each may be missing
    weight    float64[S]        factors of the samples' tokens in the loss; all 1 if missing
    truncated uint8[S]          1 for samples that were cut at a length limit; none if missing
    experts   uint8[T x n]      experts of each token (`architecture.ExpertLayers.token_bytes`); the model's choice if
                                missing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollart.architecture import ExpertLayers

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]


TOKEN_COLUMNS = ("tokens", "mask", "logprobs", "versions", "turn", "rewards", "reference", "advantage", "experts")
"""Columns [T] of a batch besides `legal`, whose values index the batch's own sets."""

SAMPLE_COLUMNS = ("domain", "group", "score", "weight", "truncated")
"""Columns [S] of a batch."""


class InvalidSamples(ValueError):
    """Samples that cannot be trained on. `samples` has all their ids, the message one id with the violated rule."""

    def __init__(self, message: str, samples: tuple[str, ...]) -> None:
        super().__init__(message)
        self.samples = samples


@dataclass(frozen=True, slots=True)
class LegalSets:
    """The distinct legal-action sets of a batch, padded to the largest: `ids` and `valid` are [sets + 1, widest]. Row 0
    means "unrestricted" and is empty."""

    ids: IntArray
    valid: BoolArray


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The N tokens with loss, in sample order. Tokens `first[s]:first[s + 1]` belong to sample s."""

    position: IntArray
    """Index into the batch's flat token arrays."""
    sample: IntArray
    first: IntArray
    slot: IntArray
    """Position of the token in its legal set (0 for unrestricted tokens)."""

    def __len__(self) -> int:
        return len(self.position)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """S samples of T tokens in total; token arrays are flat, sample s owns `offsets[s]:offsets[s + 1]`."""

    ids: tuple[str, ...]
    domains: tuple[str, ...]
    domain: IntArray
    group: IntArray
    offsets: IntArray
    score: FloatArray
    tokens: IntArray
    mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    turn: IntArray
    rewards: FloatArray
    legal: IntArray
    sets: LegalSets
    loss: LossTokens
    reference: FloatArray | None = None
    """Log-probabilities under the reference policy; None if unknown."""
    advantage: FloatArray | None = None
    """Advantages before `normalize`; None if unknown."""
    weight: FloatArray | None = None
    """Factor of each sample's tokens in the loss [S]; None: all 1."""
    truncated: BoolArray | None = None
    """True for samples that were cut at a length limit [S]; None: none was."""
    experts: NDArray[np.int16] | None = None
    """Numbers of each token's experts [T, layers, active], -1 where unknown; None: the model chooses."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.offsets)

    @property
    def used_lengths(self) -> IntArray:
        """Tokens of each sample that a forward pass needs: all before its last token with loss, which is only a target.
        0 for samples without loss."""
        last = np.zeros(len(self), np.int64)
        has = np.diff(self.loss.first) > 0
        ends = self.loss.position[self.loss.first[1:][has] - 1]
        last[has] = ends - self.offsets[:-1][has]
        return last


def decode_batch(wire: Mapping[str, Any], vocab_size: int, layers: ExpertLayers | None = None) -> TrainingBatch:
    """Check and unpack the wire form; the experts of tokens for a model with `layers` alone. `InvalidSamples` for
    samples that violate a rule, `ValueError` for an unreadable message."""
    try:
        batch = _unpack(wire, layers)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"malformed samples: {error!r}") from error
    _check(batch, vocab_size, layers)
    return batch


def select_samples(batch: TrainingBatch, samples: IntArray) -> TrainingBatch:
    """A subset of samples in the given order, equal to a batch of these samples alone, with only their own legal
    sets."""
    pick = np.concatenate([np.arange(batch.offsets[s], batch.offsets[s + 1]) for s in samples])
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(batch.lengths[samples])))
    used = np.unique(np.append(batch.legal[pick], 0))
    widest = int(batch.sets.valid[used].sum(1).max())
    sets = LegalSets(batch.sets.ids[used, :widest], batch.sets.valid[used, :widest])
    legal = np.searchsorted(used, batch.legal[pick])
    columns: dict[str, Any] = {
        name: column[rows]
        for names, rows in ((TOKEN_COLUMNS, pick), (SAMPLE_COLUMNS, samples))
        for name in names
        if (column := getattr(batch, name)) is not None
    }
    return TrainingBatch(
        ids=tuple(batch.ids[s] for s in samples),
        domains=batch.domains,
        offsets=offsets,
        legal=legal,
        sets=sets,
        loss=_loss_tokens(columns["mask"], offsets, columns["tokens"], legal, sets),
        **columns,
    )


def _unpack(wire: Mapping[str, Any], layers: ExpertLayers | None) -> TrainingBatch:
    def ints(name: str) -> IntArray:
        return np.frombuffer(wire[name], "<i4").astype(np.int64)

    ids, lengths = tuple(wire["ids"]), ints("lengths")
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    mask = np.frombuffer(wire["mask"], np.uint8) != 0
    tokens, legal, sets = ints("tokens"), ints("legal"), _legal_sets(wire["sets"])
    arrays = {
        "versions": ints("versions"),
        "turn": ints("turn"),
        "legal": legal,
        "tokens": tokens,
        "mask": mask,
        "logprobs": np.frombuffer(wire["logprobs"], "<f4").astype(np.float64),
        "rewards": np.frombuffer(wire["rewards"], "<f8"),
        **{name: np.frombuffer(wire[name], "<f8") for name in ("reference", "advantage") if name in wire},
    }
    per_sample: dict[str, NDArray[Any]] = {
        "domain": ints("domain"),
        "group": ints("group"),
        "score": np.frombuffer(wire["score"], "<f8"),
    }
    if layers is not None and "experts" in wire:
        numbers = np.frombuffer(wire["experts"], np.uint8 if layers.id_bytes == 1 else "<i2").astype(np.int16)
        if layers.id_bytes == 1:
            numbers[numbers == 255] = -1
        arrays["experts"] = numbers.reshape(-1, len(layers.layers), layers.active)
    if "weight" in wire:
        per_sample["weight"] = np.frombuffer(wire["weight"], "<f8")
    if "truncated" in wire:
        per_sample["truncated"] = np.frombuffer(wire["truncated"], np.uint8) != 0
    for name, array in (*arrays.items(), *per_sample.items()):
        expected = int(offsets[-1]) if name in arrays else len(ids)
        if len(array) != expected:
            raise ValueError(f"{name} has {len(array)} entries for {expected}")
    if len(lengths) != len(ids) or (lengths < 0).any() or legal.max(initial=0) >= len(sets.ids) or (legal < 0).any():
        raise ValueError("lengths or legal sets do not fit")
    domains = tuple(wire["domains"])
    if per_sample["domain"].max(initial=-1) >= len(domains) or per_sample["domain"].min(initial=0) < 0:
        raise ValueError("domain index out of range")
    return TrainingBatch(
        ids=ids,
        domains=domains,
        offsets=offsets,
        sets=sets,
        loss=_loss_tokens(mask, offsets, tokens, legal, sets),
        **arrays,
        **per_sample,
    )


def _legal_sets(sets: list[list[int]]) -> LegalSets:
    widest = max((len(set(s)) for s in sets), default=0)
    ids = np.zeros((len(sets) + 1, widest), np.int64)
    valid = np.zeros((len(sets) + 1, widest), np.bool_)
    for row, listed in enumerate(sets, start=1):
        members = sorted(set(listed))
        ids[row, : len(members)] = members
        valid[row, : len(members)] = True
    return LegalSets(ids, valid)


def _loss_tokens(mask: BoolArray, offsets: IntArray, tokens: IntArray, legal: IntArray, sets: LegalSets) -> LossTokens:
    position = np.flatnonzero(mask)
    first = np.searchsorted(position, offsets)
    sample = np.repeat(np.arange(len(offsets) - 1), np.diff(first))
    slot = np.zeros(len(position), np.int64)
    restricted = np.flatnonzero(legal[position])
    if len(restricted):
        at = position[restricted]
        hit = (sets.ids[legal[at]] == tokens[at, None]) & sets.valid[legal[at]]
        slot[restricted] = np.where(hit.any(1), hit.argmax(1), -1)
    return LossTokens(position, sample, first, slot)


def _check(batch: TrainingBatch, vocab_size: int, layers: ExpertLayers | None) -> None:
    loss = batch.loss
    broken: dict[str, str] = {}

    def refuse(bad: BoolArray, sample: IntArray, rule: str) -> None:
        for s in np.unique(sample[bad]):
            broken.setdefault(batch.ids[int(s)], rule)

    owner = np.repeat(np.arange(len(batch)), batch.lengths)
    outside = (batch.tokens < 0) | (batch.tokens >= vocab_size)
    refuse(outside, owner, f"a token id is outside the {vocab_size} of the model")
    if layers is not None and batch.experts is not None:
        unknown = (batch.experts < -1) | (batch.experts >= layers.experts)
        rule = f"an expert is none of the {layers.experts} of the model"
        refuse(np.logical_or.reduce(unknown, axis=(1, 2)), owner, rule)
    if ((batch.sets.ids < 0) | (batch.sets.ids >= vocab_size)).any():
        raise ValueError(f"a legal set holds a token id outside the {vocab_size} of the model")
    refuse(loss.slot < 0, loss.sample, "a sampled token is not in its own legal set")
    at = loss.position
    refuse(at == batch.offsets[loss.sample], loss.sample, "its first token cannot carry loss: nothing precedes it")
    wrong = ~np.isfinite(batch.logprobs[at]) | (batch.logprobs[at] > 1e-3)
    refuse(wrong, loss.sample, "a log-probability is not finite or above 0")
    refuse(~np.isfinite(batch.rewards[at]), loss.sample, "a reward is not finite")
    for name, column in (("reference", batch.reference), ("advantage", batch.advantage)):
        if column is not None:
            refuse(~np.isfinite(column[at]), loss.sample, f"its {name} is not finite")
    if batch.weight is not None:
        wrong = ~np.isfinite(batch.weight) | (batch.weight <= 0)
        refuse(wrong, np.arange(len(batch)), "its weight is not a positive number")
    refuse(~np.isfinite(batch.score), np.arange(len(batch)), "its score is not finite")
    if broken:
        first, rule = next(iter(broken.items()))
        more = f" (and {len(broken) - 1} other samples)" if len(broken) > 1 else ""
        raise InvalidSamples(f"sample {first}: {rule}{more}", tuple(broken))
