"""What a function runs with: its entry in the run spec, its decorator, defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.errors import SpecError
from rollart.launch.functions import packages_in
from rollart.settings.functions import FunctionRelease, effective_spec, function_spec
from rollart.settings.load import builtin
from rollart.settings.resolve import resolve_files, resolve_saved
from rollart.settings.rules import run_problems
from rollart.settings.run import FunctionEntry, RunSpec
from serverless.deploy.package import build
from serverless.spec import FunctionBatchSpec, FunctionSpec
from tests.settings.conftest import RUN

Write = Callable[..., Path]

DECORATED = """\
from rollart import reward

raise RuntimeError("a source is read, not run")


@reward(memory_mb=1024, timeout_s=3, warm=6, concurrency=8, batch={"max_items": 7}, trust="untrusted", cpu=2.0)
def exact(sample):
    return 1.0
"""


def entry(**settings: Any) -> FunctionEntry:
    return FunctionEntry(**{"name": "exact", "source": "rewards.py", "handler": "exact", **settings})


@pytest.fixture
def base(write: Write) -> Path:
    return write(DECORATED, "rewards.py").parent


def test_the_entry_wins_then_the_decorator_then_defaults(base: Path) -> None:
    found = effective_spec(entry(timeout_s=9, batch_wait_ms=11, warm=0), base)
    assert (found.timeout_s, found.warm) == (9, 0)
    assert (found.memory_mb, found.concurrency, found.trust, found.cpu) == (1024, 8, "untrusted", 2.0)
    assert found.batch == FunctionBatchSpec(max_items=7, max_wait_ms=11)
    assert (found.keep_alive_s, found.queue) == (60.0, 10_000)


VALUES: dict[str, tuple[Any, Any]] = {
    "memory_mb": (256, 2048),
    "cpu": (0.5, 3.0),
    "gpu": ("L4", "T4"),
    "trust": ("trusted", "untrusted"),
    "timeout_s": (1.5, 40.0),
    "timeout_floor": (-1.0, 0.0),
    "init_timeout_s": (2.0, 30.0),
    "concurrency": (9, 40),
    "queue": (5, 50),
    "warm": (0, 4),
    "keep_alive_s": (0.0, 5.0),
    "deterministic": (True, False),
    "stateless": (True, False),
    "preload": (["json"], []),
    "takes": ("item", "samples"),
    "secrets": (["ONE_KEY"], ["OTHER_KEY"]),
}
"""Of each key the entry's value and the decorator's."""


@settings(max_examples=30)
@given(ours=st.sets(st.sampled_from(sorted(VALUES))), theirs=st.sets(st.sampled_from(sorted(VALUES))))
def test_every_key_is_the_entrys_else_the_decorators_else_the_default(
    tmp_path_factory: pytest.TempPathFactory, ours: set[str], theirs: set[str]
) -> None:
    base = tmp_path_factory.mktemp("run")
    arguments = ", ".join(f"{key}={VALUES[key][1]!r}" for key in sorted(theirs))
    (base / "rewards.py").write_text(f"@reward({arguments})\ndef exact(sample): ...\n")
    found = effective_spec(entry(**{key: VALUES[key][0] for key in ours}), base)
    for key, (own, declared) in VALUES.items():
        expected = own if key in ours else declared if key in theirs else FunctionSpec.model_fields[key].default
        value = getattr(found, key)
        assert value == (tuple(expected) if isinstance(expected, list) else expected), key


def test_every_setting_of_a_function_can_be_given_and_in_the_same_bounds() -> None:
    def bounds(info: Any) -> dict[str, Any]:
        return {
            sign: getattr(rule, sign)
            for rule in info.metadata
            for sign in ("ge", "gt", "le", "lt", "pattern")
            if getattr(rule, sign, None) is not None
        }

    batch = {"batch_items": "max_items", "batch_wait_ms": "max_wait_ms", "batch_bytes": "max_bytes"}
    own = FunctionEntry.model_fields
    assert set(FunctionSpec.model_fields) - set(own) == {"batch", "artefacts"}
    pairs = [(own[key], FunctionBatchSpec.model_fields[theirs]) for key, theirs in batch.items()]
    same = set(own) & set(FunctionSpec.model_fields) - {"source", "handler"}
    pairs += [(own[key], FunctionSpec.model_fields[key]) for key in same]
    for ours, theirs in pairs:
        if ours.is_required():
            continue
        assert ours.default is None
        allowed, wanted = bounds(theirs), bounds(ours)
        assert {**wanted, **allowed} == wanted, ours.description


def test_a_module_beside_the_run_file_is_found_and_not_run(write: Write) -> None:
    base = write(DECORATED, "scoring_rules.py").parent
    assert effective_spec(entry(source="scoring_rules"), base).memory_mb == 1024
    package = base / "scoring_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('not run')\n")
    (package / "rules.py").write_text(DECORATED)
    assert effective_spec(entry(source="scoring_package.rules"), base).memory_mb == 1024


def test_without_a_source_only_the_entry_speaks(tmp_path: Path) -> None:
    assert effective_spec(entry(memory_mb=300), tmp_path) == FunctionSpec(
        name="exact", source="rewards.py", handler="exact", memory_mb=300
    )
    with pytest.raises(SpecError, match="'exact': warm=5 is more than concurrency=4"):
        effective_spec(entry(warm=5), tmp_path)


@pytest.mark.parametrize(
    ("source", "settings", "expected"),
    [
        (DECORATED, {"concurrency": 2}, "warm=6 is more than concurrency=2"),
        (DECORATED.replace("1024", "64"), {}, "memory_mb: Input should be greater than or equal to 128"),
        (DECORATED.replace("1024", "M"), {}, "rewards.py:6: @reward\\(memory_mb=...\\) is not a literal"),
        (DECORATED.replace("memory_mb", "memory"), {}, "no argument 'memory'; did you mean 'memory_mb'"),
        (DECORATED.replace("cpu=2.0", "artefacts='a.bin'"), {}, "artefacts: a text"),
        ("def exact(", {}, "rewards.py:1: not Python"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(
    write: Write, source: str, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SpecError, match=expected):
        effective_spec(entry(**settings), write(source, "rewards.py").parent)


def test_a_resolved_run_keeps_what_was_written_and_shows_what_runs(write: Write, base: Path) -> None:
    run = write(RUN.replace("handler: exact}", "handler: exact, timeout_s: 9}"))
    resolved = resolve_files(run)
    shown = resolved.to_dict()
    assert (shown["run"]["functions"][0]["timeout_s"], shown["run"]["functions"][0]["memory_mb"]) == (9, None)
    assert (shown["functions"]["exact"]["timeout_s"], shown["functions"]["exact"]["memory_mb"]) == (9, 1024)
    assert str(base) not in str(shown["functions"])
    saved = write(resolved.to_yaml(), "resolved.yaml")
    assert resolve_saved(saved) == resolved
    write(DECORATED.replace("1024", "2048"), "rewards.py")
    assert resolve_saved(saved).functions["exact"].memory_mb == 2048


def test_a_run_that_sets_nothing_uses_the_version_that_was_deployed(write: Write) -> None:
    base = write(DECORATED.replace('raise RuntimeError("a source is read, not run")', ""), "rewards.py").parent
    (deployed,) = packages_in("rewards.py", base=base)
    assert build(function_spec(entry()), base=base).version == deployed.version
    assert build(function_spec(entry(memory_mb=256)), base=base).version != deployed.version


@pytest.mark.parametrize(
    ("settings", "place", "expected"),
    [
        ("warm: 5, concurrency: 2", "13:61", "warm 5 (rule: at most its concurrency, 2)"),
        ("concurrency: 20000", "13:68", "functions.0.concurrency is 20000 (rule: less than or equal to 10000)"),
        ("trust: maybe", "13:62", "functions.0.trust is 'maybe' (rule: 'trusted' or 'untrusted')"),
        ("artefact: ['m:f', b]", "13:65", "2 artefacts with a producer"),
        ("gpus: 1", "13:55", "unknown key 'gpus'"),
    ],
)
def test_rules_of_an_entry(write: Write, settings: str, place: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_files(write(RUN.replace("handler: exact}", f"handler: exact, {settings}}}")))
    assert expected in str(caught.value)
    assert f"run.yaml:{place}" in str(caught.value)


def test_a_name_that_no_provider_takes(write: Write) -> None:
    with pytest.raises(SpecError, match=r"functions\.0\.name is 'a\.b'"):
        resolve_files(write(RUN.replace("{name: exact,", "{name: a.b,").replace("function: exact,", "function: a.b,")))


def problems(**entry: Any) -> list[str]:
    """What the rules say about a run with one function."""
    spec = yaml.safe_load(builtin("runs/quickstart.yaml").read_text())
    spec["functions"] = [entry]
    for domain in spec["domains"]:
        domain["rewards"] = [{"function": entry["name"]}]
    return [str(one) for one in run_problems(RunSpec.model_validate(spec))]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "f"}, "has no source (rule: source and handler, or function)"),
        ({"name": "f", "source": "f.py"}, "has no handler"),
        ({"name": "f", "function": "g@live"}, "names the deployed g@live (rule: the same name"),
        ({"name": "f", "function": "f", "source": "f.py"}, "names the deployed f, and has source"),
        ({"name": "f", "function": "f@3", "memory_mb": 256}, "names the deployed f@3, and has memory_mb"),
    ],
)
def test_a_function_has_a_source_or_is_a_deployed_one(entry: dict[str, Any], words: str) -> None:
    assert any(words in problem for problem in problems(**entry))


def test_a_deployed_function_may_be_scaled() -> None:
    assert problems(name="f", function="f@live", warm=1, concurrency=8, batch_items=4) == []


def test_a_drawn_version_has_its_deployed_settings_and_the_runs_scaling() -> None:
    drawn = FunctionRelease(
        reference="f",
        provider="local",
        version="ab" * 32,
        number="3",
        weights={"3": 1.0},
        settings={"name": "f", "memory_mb": 256, "batch": {"max_items": 5, "max_wait_ms": 9.0}, "concurrency": 2},
    )
    found = effective_spec(FunctionEntry(name="f", function="f", batch_items=7, warm=1), ".", drawn)
    assert (found.memory_mb, found.concurrency, found.warm) == (256, 2, 1)
    assert (found.batch.max_items, found.batch.max_wait_ms) == (7, 9.0)
    with pytest.raises(SpecError, match="warm=5 is more than concurrency=2"):
        effective_spec(FunctionEntry(name="f", function="f", warm=5), ".", drawn)
