"""Fit the roofline's constants to measured rows: least squares of log(predicted / measured), with rows held out.

A probe of a few dozen rows (prefill lengths × decode batches, or a closed loop at several batches) takes minutes and
replaces the priors. Constants that the rows do not identify stay at their priors and are listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from placement.architecture import DecoderShape
from placement.roofline import SHARES, Calibration, Constants, Precision, Roofline, band_of, prior
from placement.types import Device, finite_number, require_at_least, require_positive

Vector = NDArray[np.float64]

MeasurementKind = Literal["prefill", "decode", "step", "tpot", "ttft", "turn"]

FREE = ("mfu", "mfu_decode", "mbu", "layer_s", "row_s", "alpha_s")
"""The six constants of a GPU. One model cannot distinguish `step_s` from `layer_s`: all of it is attributed to the
layers."""

FREE_LAUNCHED = (*FREE, "launch_s")
"""The same where operators of prefills are launched one by one, as by the embedded engine."""

FREE_EFFECTIVE = ("effective_tflops", "effective_tb_per_s", "step_s", "row_s", "request_s")
"""For a device without datasheet figures, such as CPU cores."""

BOUNDS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(SHARES, (0.01, 1.0)),
    "step_s": (1e-7, 10.0),
    "layer_s": (1e-8, 0.1),
    "row_s": (1e-8, 1.0),
    "alpha_s": (1e-8, 1e-2),
    "request_s": (1e-7, 10.0),
    "launch_s": (1e-8, 0.1),
    "effective_tflops": (1e-7, 1e5),
    "effective_tb_per_s": (1e-7, 1e3),
}

HELD_OUT = 4
"""One of so many settings is held out of the fit."""

PRIOR_SPREAD = 0.7
"""Standard deviation, in logs, that a prior is believed with: a factor of two either way."""

MIN_NOISE = 0.01
"""Relative noise that rows are believed to have at the least: keeps tiny residuals from identifying everything."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: `seconds` of an operation of kind `kind` on `tp` devices of type `device`.

    prefill: `new` tokens after `cached`, alone, to the first token. decode: one step of `batch` sequences of mean
    `context`. step: one step with both: `new` after `cached` beside `batch` at `context`. tpot, ttft: `batch` clients
    in a closed loop, `new` (after `cached`) in and `output` out each; mean seconds per token after the first, or to it.
    turn: instance-seconds per turn in such a loop (elapsed / turns). `weight` is the number of rows that this one
    counts as.
    """

    kind: MeasurementKind
    seconds: float
    device: str
    tp: int = 1
    new: float = 0.0
    cached: float = 0.0
    batch: float = 1.0
    context: float = 0.0
    output: float = 1.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(MeasurementKind):
            raise ValueError(f"row: kind is {self.kind!r} (rule: one of {', '.join(get_args(MeasurementKind))})")
        for name in ("seconds", "weight"):
            require_positive(f"row ({self.kind}): {name}", getattr(self, name))
        for name, least in (("tp", 1), ("batch", 1), ("new", 0), ("cached", 0), ("context", 0), ("output", 0)):
            require_at_least(f"row ({self.kind}): {name}", getattr(self, name), least)


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants with the error they made on held-out rows (`calibration.error`, `.worst`), and on all rows.

    `kept` are the free constants that the rows do not identify: they stayed where they started.
    """

    calibration: Calibration
    train_error: float
    by_kind: Mapping[str, float] = field(default_factory=dict)
    """Mean absolute relative error of the final constants on all rows, by kind."""
    kept: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Only JSON types; the calibration's fields at the top level."""
        extra = {"train_error": self.train_error, "by_kind": dict(self.by_kind), "kept": list(self.kept)}
        return {**self.calibration.to_dict(), "fit": extra}

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> Fit:
        extra = data.get("fit")
        if not isinstance(extra, Mapping):
            raise ValueError("fit: field 'fit' is required and a table")
        by_kind, kept = extra.get("by_kind", {}), extra.get("kept", [])
        if not isinstance(by_kind, Mapping) or not isinstance(kept, list | tuple):
            raise ValueError("fit: by_kind is not a table or kept is not a list")
        return Fit(
            calibration=Calibration.from_dict(data),
            train_error=finite_number("fit: train_error", extra.get("train_error")),
            by_kind={str(k): finite_number(f"fit: by_kind.{k}", v) for k, v in by_kind.items()},
            kept=tuple(str(k) for k in kept),
        )


def fit(
    rows: Iterable[Row],
    shape: DecoderShape,
    devices: Mapping[str, Device],
    *,
    precision: Precision = "bf16",
    free: Sequence[str] = FREE,
    start: Constants | None = None,
    engine: str = "",
    date: str = "",
    source: str = "",
) -> Fit:
    """Constants that fit `rows`, the others as in `start` (default: the prior of the rows' generation).

    Settings (rows but for their seconds) are ordered by kind and size; every `HELD_OUT`-th is predicted by a fit to the
    others, and that is the error reported. The constants returned are of a second fit, to all rows. Deterministic.
    ValueError for rows of a device that cannot run the model.
    """
    chosen = sorted(rows, key=lambda r: (*_setting(r), r.seconds))
    if not chosen:
        raise ValueError("rows is empty (rule: at least one row)")
    used = [devices[name] for name in sorted({row.device for row in chosen})]
    generation = used[0].generation if len({d.generation for d in used}) == 1 else ""
    moe = shape.is_moe
    begin = start if start is not None else prior(generation, moe=moe)[0]
    problem = _LeastSquares(shape, devices, precision, tuple(free))
    begin = problem.started(begin, chosen)
    constants, kept, bounded = problem.solve(chosen, begin)
    # Rows that repeat a setting are held out together: otherwise the error would be that of settings that were fitted.
    settings = sorted({_setting(row) for row in chosen})
    aside = set(settings[HELD_OUT // 2 :: HELD_OUT])
    fitted, held = ([row for row in chosen if (_setting(row) in aside) is apart] for apart in (False, True))
    notes: list[str] = []
    if held:
        trial, _, _ = problem.solve(fitted, begin)
        found = errors(held, trial, shape, devices, precision)
        error, worst = float(np.mean(found)), max(found)
    else:
        found = errors(chosen, constants, shape, devices, precision)
        error, worst = max(float(np.mean(found)), band_of("prior", moe=moe)), max(found)
        notes.append(f"no row was held out of {len(chosen)}: the error is at least that of the priors")
    notes += [f"{name} is not identified by these rows and stays at {getattr(constants, name):.3g}" for name in kept]
    notes += [f"{name} is only bounded by these rows: {getattr(constants, name):.3g} explains them" for name in bounded]
    every_error = errors(chosen, constants, shape, devices, precision)
    by_kind: dict[str, float] = {
        kind: float(np.mean([e for e, r in zip(every_error, chosen, strict=True) if r.kind == kind]))
        for kind in sorted({r.kind for r in chosen})
    }
    calibration = Calibration(
        constants,
        "+".join(d.name for d in used),
        generation,
        precision,
        shape.name,
        error,
        worst,
        len(chosen),
        engine,
        date,
        source,
        tuple(notes),
    )
    return Fit(calibration, float(np.mean(every_error)), by_kind, kept)


def predict(row: Row, instance: Roofline) -> float:
    """The roofline's prediction of `row.seconds`."""
    match row.kind:
        case "prefill":
            return instance.prefill_s(row.new, row.cached)
        case "decode":
            return instance.decode_step_s(row.batch, row.context)
        case "step":
            return instance.mixed_step_s(row.batch, row.context, row.new, row.cached)
        case "tpot":
            return instance.tpot_s(row.batch, row.new, row.cached, row.output)
        case "ttft":
            return instance.ttft_s(row.batch, row.new, row.cached, row.output)
        case "turn":
            return instance.turn_s(row.batch, row.new, row.cached, row.output)


def errors(
    rows: Sequence[Row],
    constants: Constants,
    shape: DecoderShape,
    devices: Mapping[str, Device],
    precision: Precision,
) -> list[float]:
    """Absolute relative error of each row's prediction."""
    predicted = _LeastSquares(shape, devices, precision, ()).predicted(rows, constants)
    return [abs(p / r.seconds - 1) for p, r in zip(predicted, rows, strict=True)]


@dataclass(frozen=True, slots=True)
class _LeastSquares:
    """One least-squares problem: its free constants and the rows that they apply to."""

    shape: DecoderShape
    devices: Mapping[str, Device]
    precision: Precision
    free: tuple[str, ...]

    def predicted(self, rows: Sequence[Row], constants: Constants) -> list[float]:
        instances: dict[tuple[str, int], Roofline] = {}
        for row in rows:
            if (row.device, row.tp) not in instances:
                instances[row.device, row.tp] = Roofline(
                    self.shape,
                    self.devices[row.device],
                    row.tp,
                    constants,
                    precision=self.precision,
                    kv_capacity_bytes=1.0,  # capacity plays no part here, so the device need not state its memory
                )
        return [predict(row, instances[row.device, row.tp]) for row in rows]

    def started(self, begin: Constants, rows: Sequence[Row]) -> Constants:
        """`begin` with a first value for each free constant: an effective rate that is not given starts at 1.5 times
        the highest rate that the rows reached, and launches at half of the shortest prefill."""
        for name in ("effective_tflops", "effective_tb_per_s"):
            if name in self.free and getattr(begin, name) is None:
                ideal = dict.fromkeys(("step_s", "layer_s", "row_s", "alpha_s", "request_s"), 0.0)
                rates = {"effective_tflops": 1e9, "effective_tb_per_s": 1e9, name: 1.0}
                alone = self.predicted(rows, replace(begin, **ideal, **rates))
                reached = 1.5 * max(t / r.seconds for t, r in zip(alone, rows, strict=True))
                begin = replace(begin, **{name: _clipped(name, reached)})
        if "launch_s" in self.free and not begin.launch_s:
            shortest = min((row.seconds for row in rows if row.kind == "prefill"), default=0.0)
            begin = replace(begin, launch_s=0.5 * shortest / self.shape.layers)
        return replace(begin, **{name: _clipped(name, getattr(begin, name)) for name in self.free})

    def solve(self, rows: Sequence[Row], begin: Constants) -> tuple[Constants, tuple[str, ...], tuple[str, ...]]:
        """The best-fitting constants; the free constants that `rows` do not identify, left as in `begin`; and the
        constants that `rows` only bound: the bound is far from `begin`, and values beyond it fit equally well.

        Three starts for the largest problem (the maxima of the roofline make local minima); then each constant whose
        posterior is hardly narrower than its prior goes back there, unless the fit is worse for it (Akaike: by more
        than a parameter is worth).
        """
        starts = [replace(begin, **{n: _clipped(n, f * getattr(begin, n)) for n in self.free}) for f in (1.0, 0.4, 2.5)]
        best, jacobian, rss = min((self._least(rows, s, self.free) for s in starts), key=lambda found: found[2])
        free, weak = self.free, list[str]()
        if free:  # constants about which the rows say less than the prior does: the weakest first
            noise = max(math.sqrt(rss / len(rows)), MIN_NOISE)
            belief = np.eye(len(free)) * (noise / PRIOR_SPREAD) ** 2
            left = np.diag(np.linalg.inv(jacobian.T @ jacobian + belief)) * belief[0, 0]
            weak = [free[i] for i in np.argsort(-left, kind="stable") if left[i] > 0.5]
        for name in weak:
            fewer = tuple(n for n in free if n != name)
            trial, _, trial_rss = self._least(rows, replace(best, **{name: getattr(begin, name)}), fewer)
            floor = len(rows) * MIN_NOISE**2 / 100
            if len(rows) * math.log((trial_rss + floor) / (rss + floor)) <= 2.0:
                best, rss, free = trial, trial_rss, fewer
        return best, tuple(n for n in self.free if n not in free), tuple(n for n in weak if n in free)

    def _least(self, rows: Sequence[Row], begin: Constants, free: tuple[str, ...]) -> tuple[Constants, Vector, float]:
        """One solution, its Jacobian in logs of the constants, and the sum of squared residuals."""
        measured = np.log([r.seconds for r in rows])
        scale = np.sqrt([r.weight for r in rows])

        def at(logs: Vector) -> Constants:
            return replace(begin, **{n: _clipped(n, math.exp(x)) for n, x in zip(free, logs, strict=True)})

        def residuals(logs: Vector) -> Vector:
            return np.asarray(scale * (np.log(self.predicted(rows, at(logs))) - measured), dtype=np.float64)

        if not free:
            left = residuals(np.empty(0))
            return begin, np.empty((len(rows), 0)), float(left @ left)
        from scipy.optimize import least_squares  # heavy: loaded only when solving

        low, high = (np.log([BOUNDS[n][side] for n in free]) for side in (0, 1))
        x0 = np.clip(np.log([getattr(begin, n) for n in free]), low + 1e-6, high - 1e-6)
        found = least_squares(residuals, x0, bounds=(low, high), xtol=1e-8, ftol=1e-8, max_nfev=100)
        return at(found.x), found.jac, 2.0 * float(found.cost)


def _setting(row: Row) -> tuple[str, str, float, float, float, float, float, float]:
    """The measured setting."""
    return row.kind, row.device, row.tp, row.new, row.cached, row.batch, row.context, row.output


def _clipped(name: str, value: float) -> float:
    low, high = BOUNDS[name]
    return min(max(value, low), high)
