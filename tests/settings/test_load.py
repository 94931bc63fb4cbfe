"""A wrong spec says where, what and which rule; a right one is typed."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.errors import SpecError
from rollart.settings.load import load_cluster, load_file, load_prices, load_run

Write = Callable[..., Path]
RUN = (Path(__file__).parent / "run.yaml").read_text()


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_run(path, overrides)
    assert caught.value.exit_code == 2
    return caught.value.message.replace(f"{path}", "run.yaml").split("\n")


def test_a_run_is_typed_and_has_defaults(write: Write) -> None:
    run = load_run(write())
    assert run.domains[0].rewards[0].weight == 2.0
    assert (run.schedule, run.staleness, run.training.loss.kind) == ("async", 1, "decoupled")
    assert run.domain("lake").group_size == 8
    assert [function.handler for function in run.functions] == ["exact"]
    with pytest.raises(KeyError):
        run.domain("none")


def test_an_unknown_key_has_a_place_and_a_suggestion(write: Write) -> None:
    assert problems(write(RUN + "stalenes: 2\n")) == [
        "run.yaml:14:1: unknown key 'stalenes' in run "
        "(rule: only keys of `rollart schema run`; did you mean 'staleness'?)"
    ]


def test_all_problems_come_together_in_file_order(write: Write) -> None:
    text = RUN.replace("group_size: 8", "group_sise: 8").replace("trajectories: 16", "trajectories: many")
    found = problems(write(text + "evaluation: {at: [middle]}\nseed: -1\n"))
    assert [line.split(": ")[0] for line in found] == [
        "run.yaml:4:17",
        "run.yaml:8:5",
        "run.yaml:14:19",
        "run.yaml:15:7",
    ]
    assert "batch.trajectories is 'many'" in found[0]
    assert "did you mean 'group_size'?" in found[1]
    assert "rule: 'start' or 'end'" in found[2]
    assert "seed is -1 (rule: greater than or equal to 0)" in found[3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml:1:1: the file is empty"),
        ("# only a comment\n", "run.yaml:1:1: the file is empty"),
        ("- a\n- b\n", "run.yaml:1:1: the file holds a list"),
        ("just text", "run.yaml:1:1: the file holds a single value"),
        ("name: [1, 2", "run.yaml:1:12: not YAML: while parsing a flow sequence"),
        ("name: a\n\tseed: 1\n", "run.yaml:2:1: not YAML"),
        ("name: a\nseed: 1\nname: b\n", "run.yaml:3:1: key 'name' is given twice (rule: once; first at line 1)"),
        ("a: &x [*x]\n", "an alias contains itself"),
        ("name: !!python/object:os.system x\n", "could not determine a constructor"),
        ("? [a]\n: 1\n", "a key is a list or a mapping"),
        ("name: a\x01b\n", "not YAML"),
        ("a: " + "[" * 200 + "]" * 200, "key 'name' is missing"),
        pytest.param("a: " + "[" * 1200 + "]" * 1200, "nested too deeply", marks=pytest.mark.slow),
    ],
)
def test_text_that_is_not_a_spec(write: Write, text: str, expected: str) -> None:
    assert expected in problems(write(text))[0]


def test_an_alias_bomb_is_refused(write: Write) -> None:
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
    )
    assert "aliases may not blow up" in problems(write(bomb))[0]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no such file" in problems(tmp_path / "none.yaml")[0]
    assert "is a directory" in problems(tmp_path)[0]
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in problems(binary)[0]


def test_missing_keys(write: Write) -> None:
    found = problems(write("name: x\n"))
    assert [line.split(" (")[0] for line in found] == [
        "run.yaml:1:1: key 'model' is missing in run",
    ]
    (found,) = problems(write("name: x\nmodel: {config: {}}\n"))
    assert "domains has no entry (rule: at least one, unless training.algorithm is sft)" in found


def test_numbers_are_yaml_1_2(write: Write) -> None:
    run = load_run(write(RUN.replace("hidden_size: 64", "a: 1e-3, b: no, c: 2026-01-01, d: true, e: .5")))
    assert run.model.init == {"a": 1e-3, "b": "no", "c": "2026-01-01", "d": True, "e": 0.5}


def test_merge_keys(write: Write) -> None:
    text = RUN.replace("  - name: lake", "  - &lake\n    name: lake") + "training: {lr: 1e-3}\n"
    text = text.replace("functions:", "  - {<<: *lake, name: pond}\nfunctions:")
    run = load_run(write(text))
    assert [d.name for d in run.domains] == ["lake", "pond"]
    assert run.domains[1].group_size == 8


class TestOverrides:
    def test_paths_by_index_by_name_and_through_missing_mappings(self, write: Write) -> None:
        run = load_run(
            write(),
            [
                "batch.trajectories=32",
                "domains.0.max_turns=5",
                "domains.lake.temperature=0.5",
                "training.loss.kind=tis",
                "training.lr=1e-4",
                "domains.lake.stop=[a, b]",
                "batch.trajectories=64",
                "budget.usd=",
                "name=n=1"[:6],
            ],
        )
        assert run.batch.trajectories == 64
        assert run.domains[0].max_turns == 5
        assert run.domains[0].temperature == 0.5
        assert (run.training.loss.kind, run.training.lr) == ("tis", 1e-4)
        assert run.domains[0].stop == ["a", "b"]
        assert run.budget.usd is None

    def test_a_page_of_digits_is_not_repeated(self, write: Write) -> None:
        for digits in (400, 5000):
            found = "\n".join(problems(write(), f"placement.in_flight={'9' * digits}"))
            assert found.startswith("override 'placement.in_flight=999")
            assert len(found) < 500

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("staleness=9", "override 'staleness=9': staleness is 9 (rule: less than or equal to 8)"),
            ("batch.tokenz=1", "override 'batch.tokenz=1': unknown key 'tokenz' in batch"),
            ("nothing", "override 'nothing' is not key=value"),
            ("=3", "override '=3' is not key=value"),
            ("a..b=3", "a part of the path is empty"),
            ("domains.lakes.weight=1", "'domains' has no item 'lakes'"),
            ("domains.7.weight=1", "an index below 1 or a name; known: lake"),
            ("name.first=1", "'name' is a single value 'test': it has no 'first'"),
            ("seed=[1", "override 'seed=[1':1:3: not YAML"),
            ("batch=3", "override 'batch=3': batch is 3 (rule: a mapping of keys to values)"),
        ],
    )
    def test_wrong_ones_name_themselves(self, write: Write, override: str, expected: str) -> None:
        assert expected in "\n".join(problems(write(), override))


class TestRules:
    @pytest.mark.parametrize(
        ("old", "new", "place", "expected"),
        [
            ("function: exact,", "function: exakt,", "11:20", "(rule: an entry of `functions`; did you mean 'exact'?)"),
            ("name: test", "name: test\nschedule: sync\nstaleness: 1", "3:12", "staleness is 1 (rule: 0 under"),
            ("{init: {hidden_size: 64}, context: 128}", "{path: a, init: {}}", "2:8", "exactly one"),
            ("group_size: 8", "group_size: 1", "8:17", "at least 2 for `advantage.baseline: group`"),
            ("group_size: 8", "trajectories: 12\n    group_size: 8", "4:17", "a multiple of its group_size 8"),
            ("group_size: 8", "trajectories: 8\n    group_size: 8", "4:17", "the sum of the domains' trajectories, 8"),
            ("trajectories: 16", "trajectories: 13", "4:17", "these shares make 8"),
            ("max_tokens: 4", "max_tokens: 128", "9:17", "below model.context, 128"),
            ("functions:", "warm_start: {domains: [lak]}\nfunctions:", "12:24", "did you mean 'lake'?"),
            ("  - {name: exact,", "  - {name: exact, source: a, handler: b}\n  - {name: exact,", "13:12", "unique"),
        ],
    )
    def test_rules_between_fields(self, write: Write, old: str, new: str, place: str, expected: str) -> None:
        assert old in RUN
        found = problems(write(RUN.replace(old, new)))
        assert found[0].startswith(f"run.yaml:{place}: ")
        assert expected in "\n".join(found)

    def test_a_domain_that_pays_nothing(self, write: Write) -> None:
        assert "pays nothing" in problems(write(), "domains.0.rewards=[]", "domains.0.env_reward_weight=0")[0]

    def test_sync_without_staleness_is_on_policy(self, write: Write) -> None:
        assert load_run(write(), ["schedule=sync"]).staleness == 0

    def test_a_deterministic_run_trains_nothing_because_it_ends_first(self, write: Write) -> None:
        """And its functions score each item alone."""
        for override, expected in (
            ("seed=1", "deterministic is given with schedule async (rule: sync, sync_plus or one_off"),
            ("rollout.redundancy.groups=1.5", "deterministic is given with rollout.redundancy (rule: none"),
            ("batch.tokens=900", "deterministic is given with batch.sampler or batch.tokens (rule: whole batches)"),
            ("domains.0.cap=0.9", "deterministic is given with shares of the run"),
        ):
            assert expected in "\n".join(problems(write(), "deterministic=true", override))
        run = load_run(write(), ["deterministic=true", "schedule=one_off", "functions.0.batch_items=9"])
        assert [one.batch_items for one in run.functions] == [1]


def test_cluster_and_price_rules(write: Write) -> None:
    pools = "name: c\npools: [{name: a, device: H800, count: 1}, {name: a, count: 2}]\nengines: {device: H80}\n"
    with pytest.raises(SpecError, match="names are unique") as caught:
        load_cluster(write(pools))
    assert "did you mean 'H800'?" in caught.value.message
    price = "{name: cpu, usd: 1, source: me, date: 2026-01-01}"
    with pytest.raises(SpecError, match="given twice"):
        load_prices(write(f"prices: [{price}, {price}]\n"))
    model = "{name: m, unit: million-input-tokens, usd: 1, source: me, date: 2026-01-01}"
    with pytest.raises(SpecError, match="none per million-output-tokens, which would count as") as caught:
        load_prices(write(f"prices: [{model}]\n"))
    assert "add its price per million-output-tokens" in caught.value.remedy
    cluster = "name: c\npools: [{name: a, count: 2}]\nprice_list: [{name: NAME, unit: million-input-tokens, usd: 1, "
    cluster += "source: me, date: 2026-01-01}]\n"
    with pytest.raises(SpecError, match="'m' has a price per million-input-tokens and none per") as caught:
        load_cluster(write(cluster.replace("NAME", "m")))
    load_cluster(write(cluster.replace("NAME", "api.openai.com/gpt-5-mini")))  # the shipped list has the other price


def test_a_file_is_known_by_its_keys(write: Write) -> None:
    assert type(load_file(write())).__name__ == "RunSpec"
    assert type(load_file("configs/clusters/local.yaml")).__name__ == "ClusterSpec"
    assert type(load_file("configs/prices.yaml")).__name__ == "PriceList"


@pytest.mark.parametrize("path", sorted(Path("configs").rglob("*.yaml"), key=str), ids=str)
def test_every_shipped_spec_is_valid(path: Path) -> None:
    load_file(path)


VALUES: tuple[Any, ...] = ([], ["async"], {}, {"a": [{}]}, None, -1.5, 10**400, True, "")


@pytest.mark.parametrize("value", ["[async]", "{a: 1}", "null", "3", "true"])
def test_a_schedule_that_is_no_text_is_a_spec_error_at_its_line(write: Write, value: str) -> None:
    assert problems(write(RUN + f"schedule: {value}\n"))[0].startswith("run.yaml:14:11: schedule is ")


@pytest.mark.slow  # some hundred files are written and read
@pytest.mark.parametrize("path", ["runs/quickstart", "runs/agentic-math-32b", "clusters/local"])
def test_a_value_of_another_type_anywhere_is_a_spec_error(path: str, write: Write) -> None:
    """Every key of shipped specs, with values of other types in turn: accepted, or an error with exit code 2."""
    values = yaml.safe_load(Path(f"configs/{path}.yaml").read_text())
    for number, at in enumerate(places(values)):
        load_with(values, at, VALUES[number % len(VALUES)], write)


@pytest.mark.parametrize("value", VALUES)
def test_a_price_of_another_type_is_a_spec_error(value: Any, write: Write) -> None:
    """One entry of the shipped list stands for all: they have the same keys."""
    values = yaml.safe_load(Path("configs/prices.yaml").read_text())
    values["prices"] = values["prices"][:1]
    for at in places(values):
        load_with(values, at, value, write)


def load_with(values: Any, at: tuple[Any, ...], value: Any, write: Write) -> None:
    changed = copy.deepcopy(values)
    functools.reduce(operator.getitem, at[:-1], changed)[at[-1]] = value
    with contextlib.suppress(SpecError):
        load_file(write(json.dumps(changed, default=str)))


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a document stand."""
    if at:
        yield at
    for key, below in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(below, (*at, key))


def test_a_file_that_is_too_large_is_refused_before_it_is_parsed(write: Write) -> None:
    found = problems(write(RUN + "# nothing\n" * 300_000))
    assert "the file has 3.0 MB (rule: at most 2 MB)" in found[0]


def test_an_error_does_not_list_thousands(write: Write) -> None:
    domains = "".join(f"  - {{name: d{i}, environment: 'a:b', group_size: 3}}\n" for i in range(100))
    (found,) = problems(write(f"name: x\nmodel: {{path: p}}\nbatch: {{trajectories: 16}}\ndomains:\n{domains}"))
    assert "d0 3, d1 3" in found
    assert "and 88 more" in found
    assert len(found) < 500
    found = problems(write(f"name: x\nmodel: {{path: p}}\ndomains:\n{domains.replace('group_size: 3', 'group: 3')}"))
    assert (len(found), found[-1]) == (51, "and 50 more problems")
