"""Prints how far the roofline is from measured runs: `python -m tests.oracles.table`.

TPOT: the six constants fitted to H200 rows only. TTFT: prefill share and cost per request fitted to H200 rows only, the
rest as for TPOT. "priors": as `placement.roofline` has them; two of Hopper's (row_s, alpha_s) come from the same H200
rows of Llama-3.1-70B. "band": what a plan would say of its error there; it is not meant for times to first token.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from placement.calibrate import FREE, Fit, MeasurementKind, errors, fit
from placement.roofline import Constants, Roofline, RooflinePerformance
from tests.oracles.silicon import CASES, DEVICES, LLAMA, Case, package, rows, shape


@dataclass(frozen=True, slots=True)
class Line:
    """Errors of one way to get constants on one device's rows: mean and largest, relative."""

    case: str
    measure: MeasurementKind
    constants: str
    device: str
    n: int
    mape: float
    worst: float
    band: float


def fit_h200(case: Case, kind: MeasurementKind, start: Constants | None = None) -> Fit:
    """Constants from the H200 rows of the installed file alone."""
    free = ("mfu", "request_s") if kind == "ttft" else FREE
    return fit(
        rows(case, kind)["H200"],
        shape(case),
        DEVICES,
        precision=case.precision,
        free=free,
        start=start,
        engine=case.backend,
    )


def lines(case: Case, kinds: tuple[MeasurementKind, ...] = ("tpot",)) -> list[Line]:
    """The lines of one case. The file must be there."""
    model, found = shape(case), list[Line]()
    tpot = fit_h200(case, "tpot")
    for kind in kinds:
        fitted = tpot if kind == "tpot" else fit_h200(case, kind, tpot.calibration.constants)
        ways = {
            "fitted on H200": RooflinePerformance(model, {"H200": fitted.calibration}, precision=case.precision),
            "priors": RooflinePerformance(model, precision=case.precision),
        }
        for name, measured in rows(case, kind).items():
            for way, performance in ways.items():
                instance = performance.instance(DEVICES[name], 1)
                if not measured or not isinstance(instance, Roofline):
                    continue
                wrong = errors(measured, instance.constants, model, DEVICES, case.precision)
                mape = sum(wrong) / len(wrong)
                found.append(Line(case.name, kind, way, name, len(wrong), mape, max(wrong), instance.band))
    return found


def main() -> int:
    """The table as Markdown; 1 if there are no rows to compare with."""
    if package() is None:
        print("no measured rows: pip install --no-deps aiconfigurator-core==0.12.0", file=sys.stderr)
        return 1
    print("| model, engine | measure | constants | GPU | n | MAPE | worst | band |\n|---|---|---|---|---|---|---|---|")
    for case in CASES:
        for line in lines(case, ("tpot", "ttft") if case is LLAMA else ("tpot",)):
            band = f"{line.band:.0%}" if line.measure == "tpot" else ""
            print(
                f"| {line.case} | {line.measure.upper()} | {line.constants} | {line.device} | {line.n}"
                f" | {line.mape:.1%} | {line.worst:.0%} | {band} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
