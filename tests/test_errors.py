"""Errors cross processes and nodes as what they are: for some the controller restarts a part, others end the run."""

from __future__ import annotations

import pickle

import pytest

from rollart import errors

MADE = [
    errors.SpecError("no such key", where="run.yaml:3:1", remedy="mend it"),
    errors.PartDied("engine-0", "ended with status 1", remedy="see its log"),
    errors.NoPlace("engine-0", "no node"),
    errors.LeaseExpired("lake-0.1", "a step", 3.0),
    errors.EnvironmentFault("environment-0", "raised", incident="its end"),
    errors.EngineError("status 500", retryable=False),
    errors.HandoffFailed("gone"),
    errors.WrongAnswer("NaN"),
    errors.TrainerRefused("a NaN", samples=("a.0",)),
]


def kinds(base: type[errors.RollartError]) -> set[type[errors.RollartError]]:
    return {base}.union(*map(kinds, base.__subclasses__()))


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_on_the_other_side(error: errors.RollartError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args, vars(again), str(again)) == (type(error), error.args, vars(error), str(error))


def test_every_kind_whose_constructor_is_its_own_is_among_them() -> None:
    own = {
        kind for kind in kinds(errors.RollartError) if kind.__module__ == errors.__name__ and "__init__" in vars(kind)
    }
    assert own - {errors.RollartError} == {type(error) for error in MADE} - {errors.NoPlace}
