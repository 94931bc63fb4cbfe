"""A mixed-integer program by named rows, and HiGHS through scipy to solve it. Knows nothing of placement.

scipy is imported when something is solved, not before: importing `placement` stays light.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
RowKey = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class MilpSolution:
    """Values of the columns, the objective there, and the best that any solution could have. `duals`, of linear
    programs: by how much the maximum rises per unit of a row's bound."""

    x: Floats
    value: float
    bound: float
    duals: Mapping[RowKey, float] = field(default_factory=dict)
    complete: bool = True
    """Whether the bound is one of the whole program, and not of a part of it."""


class ConstraintMatrix:
    """Columns with bounds, and rows `low <= a·x <= high` under unique keys. Objectives are maximised."""

    def __init__(self) -> None:
        self.low: list[float] = []
        self.high: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[RowKey] = []
        self._bounds: list[tuple[float, float]] = []
        self._of: dict[RowKey, int] = {}
        self._i: list[Ints] = []
        self._j: list[Ints] = []
        self._v: list[Floats] = []

    def copy(self) -> ConstraintMatrix:
        """An independent copy. Rows and columns that exist are shared, since they never change."""
        other = ConstraintMatrix()
        for name, value in vars(self).items():
            setattr(other, name, value.copy())
        return other

    @property
    def width(self) -> int:
        return len(self.low)

    def column(self, *, low: float = 0.0, high: float = math.inf, whole: bool = False) -> int:
        return self.columns(1, low=low, high=high, whole=whole)

    def columns(self, count: int, *, low: float = 0.0, high: float = math.inf, whole: bool = False) -> int:
        """Add columns; the number of the first."""
        first = len(self.low)
        self.low += [low] * count
        self.high += [high] * count
        self.whole += [whole] * count
        return first

    def row(
        self, key: RowKey, terms: Iterable[tuple[int, float]] = (), *, low: float = -math.inf, high: float = math.inf
    ) -> None:
        if key in self._of:
            raise AssertionError(f"row {key} twice")
        self._of[key] = len(self.rows)
        self.rows.append(key)
        self._bounds.append((low, high))
        pairs = list(terms)
        self.add(key, [j for j, _ in pairs], [v for _, v in pairs])

    def add(self, key: RowKey, columns: Sequence[int] | Ints, values: Sequence[float] | Floats) -> None:
        """Add terms to a row; those of one column sum up."""
        j = np.asarray(columns, dtype=np.int64)
        self._i.append(np.full(len(j), self._of[key], dtype=np.int64))
        self._j.append(j)
        self._v.append(np.asarray(values, dtype=np.float64))

    def scatter(self, keys: Sequence[RowKey], which: Ints, first: int, values: Floats) -> None:
        """Column `first + k` gets `values[k]` in row `keys[which[k]]`; nothing where `which[k]` is negative."""
        position = np.array([self._of.get(k, -1) for k in keys], dtype=np.int64)
        used = (which >= 0) & (values != 0)
        self._i.append(position[which[used]])
        self._j.append(first + np.nonzero(used)[0])
        self._v.append(values[used])

    @contextmanager
    def bounded(self, bounds: Mapping[int, tuple[float, float]]) -> Iterator[None]:
        """Within this context columns have other bounds."""
        before = {j: (self.low[j], self.high[j]) for j in bounds}
        for j, (low, high) in bounds.items():
            self.low[j], self.high[j] = low, high
        try:
            yield
        finally:
            for j, (low, high) in before.items():
                self.low[j], self.high[j] = low, high

    def fix(self, column: int, value: float) -> None:
        self.low[column] = self.high[column] = float(value)

    def has(self, key: RowKey) -> bool:
        return key in self._of

    def limit(self, key: RowKey, *, low: float = -math.inf, high: float = math.inf) -> None:
        self._bounds[self._of[key]] = (low, high)

    def maximise(
        self, objective: Floats, *, gap: float, nodes: int, within: Mapping[int, tuple[float, float]] | None = None
    ) -> MilpSolution | None:
        """The best solution found in `nodes` nodes, some columns kept `within` tighter bounds. None if there is none,
        or none was found. RuntimeError if HiGHS stops for another reason."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        a, low, high = self._assembled()
        lower, upper = np.array(self.low), np.array(self.high)
        for j, (least, most) in (within or {}).items():
            lower[j], upper[j] = max(lower[j], least), min(upper[j], most)
        if (lower > upper).any():
            return None
        live = (lower != 0) | (upper != 0)
        with suppress_c_stdout():
            found = milp(
                -objective[live],
                integrality=np.array(self.whole, dtype=np.int64)[live],
                bounds=Bounds(lower[live], upper[live]),
                constraints=LinearConstraint(a[:, live], low, high),
                # Presolve is not faster here.
                options={"mip_rel_gap": gap, "presolve": False, "node_limit": nodes},
            )
        if found.x is None:
            if found.status in (1, 2, 4):  # node limit, or infeasible
                return None
            raise RuntimeError(f"HiGHS: {found.message} (status {found.status})")
        x = _expanded(found.x, live)
        value = float(objective @ x)
        bound = value if found.mip_dual_bound is None else max(value, -float(found.mip_dual_bound))
        return MilpSolution(x, value, bound, complete=not within)

    def relaxed(self, objective: Floats, *, fix: Mapping[int, float] | None = None) -> MilpSolution | None:
        """The best with fractions allowed, some columns fixed; with dual prices. None if there is none.

        Columns fixed at 0 are left out here and in `maximise`: HiGHS would carry them through every iteration."""
        from scipy.optimize import linprog
        from scipy.sparse import vstack

        a, low, high = self._assembled()
        lower, upper = np.array(self.low), np.array(self.high)
        for j, given in (fix or {}).items():
            lower[j] = upper[j] = given
        live = (lower != 0) | (upper != 0)
        a = a[:, live]
        equal = low == high
        over, under = ~equal & np.isfinite(high), ~equal & np.isfinite(low)

        found = linprog(
            -objective[live],
            A_ub=vstack([a[over], -a[under]]),
            b_ub=np.concatenate([high[over], -low[under]]),
            A_eq=a[equal],
            b_eq=low[equal],
            bounds=np.column_stack([lower[live], upper[live]]),
            method="highs",
        )
        if found.status == 2:
            return None
        if found.status != 0:
            raise RuntimeError(f"HiGHS: {found.message} (status {found.status})")
        dual = np.zeros(len(self.rows))
        marginal = -np.asarray(found.ineqlin.marginals)
        dual[over] += marginal[: int(over.sum())]
        dual[under] -= marginal[int(over.sum()) :]
        dual[equal] = -np.asarray(found.eqlin.marginals)
        x = _expanded(found.x, live)
        value = float(objective @ x)
        return MilpSolution(x, value, value, dict(zip(self.rows, dual.tolist(), strict=True)))

    def _assembled(self) -> tuple[Any, Floats, Floats]:
        """The rows as a sparse matrix of scipy's, and their bounds."""
        from scipy.sparse import csr_matrix

        i, j, v = (np.concatenate(part) if part else np.zeros(0) for part in (self._i, self._j, self._v))
        a = csr_matrix((v, (i, j)), shape=(len(self.rows), self.width))
        bounds = np.array(self._bounds).reshape(-1, 2)
        return a, bounds[:, 0], bounds[:, 1]


def _expanded(x: Floats, live: NDArray[np.bool_]) -> Floats:
    """The solution over all columns: columns that were left out are 0."""
    out = np.zeros(len(live))
    out[live] = x
    return out


@contextmanager
def suppress_c_stdout() -> Iterator[None]:
    """Discard the output of C code to `stdout` in this context: HiGHS 1.12 (scipy 1.17) announces repairs of rounded
    solutions there whatever its log options (ERGO-Code/HiGHS issue 2783), which would end up in the JSON that a program
    writes. Python's output and file descriptor 1 are unaffected: only glibc's `stdout` variable refers to another
    stream. With another libc nothing changes, and a stray line may appear."""
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    stdout = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stdout")
    with _lock:
        _state["nowhere"] = _state["nowhere"] or _null_stream()
        if _state["nowhere"] and _state["depth"] == 0:
            _state["stdout"], stdout.value = stdout.value or 0, _state["nowhere"]
        _state["depth"] += 1
    try:
        yield
    finally:
        with _lock:
            _state["depth"] -= 1
            if _state["nowhere"] and _state["depth"] == 0:
                stdout.value = _state["stdout"]


def _null_stream() -> int:
    """A C stream to /dev/null, opened once; 0 if there is none."""
    fopen = ctypes.CDLL(None).fopen
    fopen.restype, fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
    return fopen(os.devnull.encode(), b"w") or 0


_lock = threading.Lock()
_state: dict[str, int] = {"depth": 0, "stdout": 0, "nowhere": 0}
