"""Engines of the published hardware and models, for tests of the simulated world."""

from __future__ import annotations

from functools import cache

from placement.architecture import DecoderShape, shape_of
from placement.hardware import device
from placement.roofline import Constants, Roofline, RooflinePerformance
from rollart.model import GenerateRequest, Sampling
from rollart.sim.engine import EngineLimits, ModelledEngine
from rollart.sim.steps import StepModel
from tests.placement.test_rollart_bands import MODELS


@cache
def shape(model: str = "8B") -> DecoderShape:
    return shape_of(MODELS[model], name=model)


@cache
def roofline(kind: str = "H800", tp: int = 1, model: str = "8B", request_s: float = 0.0) -> Roofline:
    constants = {kind: Constants(request_s=request_s)} if request_s else {}
    found = RooflinePerformance(shape(model), constants).instance(device(kind), tp)
    assert isinstance(found, Roofline), found
    return found


@cache
def steps(kind: str = "H800", tp: int = 1, model: str = "8B") -> StepModel:
    return StepModel(roofline(kind, tp, model))


def engine(name: str = "e", kind: str = "H800", *, version: int = 0, **limits: float) -> ModelledEngine:
    return ModelledEngine(name, steps(kind), version=version, limits=EngineLimits(**limits))  # type: ignore[arg-type]


def turn(
    name: str, prompt: int, output: int, *, session: str = "", salt: str | None = None, kv: object = None
) -> GenerateRequest:
    """A request of masses: `prompt` tokens in one piece."""
    return GenerateRequest(name, session or name, (prompt,), Sampling(max_tokens=output), salt, kv)  # type: ignore[arg-type]
