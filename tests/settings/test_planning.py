"""From specs to a plan: what is computed, what is only predicted, what has no answer, and what would change it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from placement.problem import Restriction
from placement.types import Objective, Role
from rollart.errors import SpecError, UsageError
from rollart.settings.load import builtin
from rollart.settings.planning import Specs, load_calibrations, planning_problem
from rollart.settings.resolve import forecast, read_specs, resolve_files, resolve_saved
from rollart.settings.rules import quotas
from rollart.settings.variants import apply_changes

Write = Callable[..., Path]

CLUSTER = """\
name: c
pools:
  - {name: big, device: H800, count: 8, devices_per_host: 8}
  - {name: wide, device: H20, count: 8}
links:
  - {a: big, b: wide, gb_per_s: 100}
"""

RUN = """\
name: r
model:
  context: 4096
  config:
    {model_type: qwen3, vocab_size: 1000, hidden_size: 1024, intermediate_size: 3072, num_hidden_layers: 12,
     num_attention_heads: 16, num_key_value_heads: 8, head_dim: 64, tie_word_embeddings: false}
batch: {trajectories: 64}
domains:
  - name: chat
    environment: tests.envs:Lake
    max_tokens: 512
    profile: {turns: 4, first_tokens: 500, new_tokens: 100, output_tokens: 200, reward: {seconds: 1}}
"""


@pytest.fixture
def specs(write: Write) -> Callable[..., Specs]:
    def specs(*overrides: str, cluster: str = CLUSTER, run: str = RUN) -> Specs:
        return read_specs(write(run), write(cluster, "c.yaml"), overrides)

    return specs


Make = Callable[..., Specs]


class TestProblem:
    def test_wishes_become_the_problem(self, specs: Make) -> None:
        made = specs(
            "placement.objective=min_cost",
            "placement.rate=2",
            "placement.budget_usd_per_hour=50",
            "placement.in_flight=77",
            "placement.tensor_parallel=[4, 2]",
            "placement.prefill_decode=off",
            "placement.utilisation=0.8",
            "hw_affinity={default: wide}",
            "placement.train={pool: H800, devices: 2}",
            "staleness=3",
            "cluster.engines.max_slots=99",
            "cluster.engines.device=H20",
        )
        found = planning_problem(made).problem
        assert (found.objective, found.rate, found.budget_usd_per_hour) == (Objective.MIN_COST, 2, 50)
        assert (found.trajectories_in_flight, found.tensor_parallel, found.utilisation) == (77, (2, 4), 0.8)
        assert Role.PREFILL not in found.roles
        assert Role.ENGINE in found.roles
        assert (found.affinity, found.device_types) == ({"chat": ("wide",)}, frozenset({"H20"}))
        assert found.train is not None
        assert (found.train.pool, found.train.devices, found.train.in_flight) == ("big", 2, 256)
        assert (found.max_batch, found.links[0].gb_per_s) == (99, 100)
        made = specs("placement.prefill_decode=only")
        assert planning_problem(made).problem.restriction is Restriction.PD_ONLY

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("placement.tensor_parallel=[3]", "placement.tensor_parallel has 3: .*16"),
            ("rollout.parallelism={sizes: [1, 3]}", "rollout.parallelism.sizes has 3: .*16"),
            ("placement.train.pool=H900", "placement.train.pool is 'H900'.*did you mean"),
            ("cluster.functions.price=lambda", "functions.price is 'lambda'"),
            ("model.config={hidden_size: 7}", "model: "),
            ("placement.objective=min_cost", "placement.objective is min_cost"),
        ],
    )
    def test_nonsense_names_its_key(self, specs: Make, override: str, expected: str) -> None:
        def ask() -> None:
            made = specs(override)
            planning_problem(made)

        with pytest.raises(SpecError, match=expected):
            ask()

    def test_a_model_that_no_default_degree_divides_still_has_others(self, specs: Make) -> None:
        made = specs(run=RUN.replace("num_key_value_heads: 8", "num_key_value_heads: 2"))
        assert planning_problem(made).problem.tensor_parallel == (1, 2, 4, 8)

    def test_what_is_assumed_is_said(self, specs: Make) -> None:
        made = specs("domains.chat.profile=", "schedule=sync")
        notes = planning_problem(made).notes
        assert "assumed: every trajectory of chat is as long as" in notes[0]
        assert "schedule is sync" in notes[1]

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("[1, 2]", "it holds no mapping"),
            ('{"schema_version": 99}', "schema_version is 99"),
            ("{", r"calibration '.*/cal\.json': "),
            (None, "cannot be read"),
        ],
    )
    def test_a_calibration_that_is_none(self, specs: Make, write: Write, text: str | None, expected: str) -> None:
        if text is not None:
            write(text, "cal.json")
        made = specs("cluster.calibration=[cal.json]")
        assert Path(made.cluster.calibration[0]).is_absolute(), "a run's directory keeps the spec elsewhere"
        with pytest.raises(SpecError, match=expected) as caught:
            load_calibrations(made.cluster)
        assert "\n" not in caught.value.message


@pytest.mark.slow
class TestPlans:
    """Slow: each solves a mixed-integer program or two."""

    def test_a_computed_plan_is_placed_and_comes_back(self, specs: Make, write: Write, tmp_path: Path) -> None:
        specs()
        resolved = resolve_files(tmp_path / "run.yaml", tmp_path / "c.yaml")
        found = resolved.plan.placement
        assert found is not None
        assert found.rate > 0
        assert resolved.plan.rates == {"trajectories": found.rate}
        for pool in resolved.cluster.pools:
            placed = [a for a in resolved.plan.assignments if a.pool == pool.name]
            assert sum(len(a.devices) for a in placed) == sum(
                d.devices for d in found.deployments if d.pool == pool.name
            )
        assert len({a.name for a in resolved.plan.assignments}) == len(resolved.plan.assignments)
        assert resolve_saved(write(resolved.to_yaml(), "resolved.yaml")) == resolved, "solving is deterministic"

    def test_affinity_constrains_the_plan(self, specs: Make) -> None:
        plan = forecast(specs("hw_affinity={chat: wide}")).plan.placement
        assert plan is not None
        assert {f.pool for f in plan.flows} == {"wide"}

    def test_given_engines_are_kept_and_their_rate_predicted(self, specs: Make) -> None:
        engines = "cluster.engines={count: 2, device: H20, threads: 2}"
        computed = forecast(specs()).plan.placement
        given = forecast(specs(engines, "cluster.trainer={device: H800, threads: 4}"))
        found = given.plan.placement
        assert computed is not None
        assert found is not None
        assert [a.name for a in given.plan.assignments] == ["engine-0", "engine-1", "trainer-0"]
        assert 0 < found.rate <= computed.rate * (1 + computed.gap)
        assert given.plan.binds.startswith("H800 of pool 'big'"), "devices bind what is fixed"

    def test_without_figures_nothing_is_predicted_and_the_run_still_starts(self, specs: Make) -> None:
        cluster = "name: c\npools: [{name: p, count: 2}]\nengines: {count: 1}\n"
        resolved = forecast(specs(cluster=cluster))
        assert resolved.plan.placement is None
        assert "no prediction: " in resolved.notes[0]
        with pytest.raises(SpecError, match="no plan: "):
            forecast(specs(cluster=cluster.replace("engines: {count: 1}\n", "")))

    def test_no_plan_says_what_binds(self, specs: Make) -> None:
        with pytest.raises(SpecError) as caught:
            forecast(specs("placement.objective=min_cost", "placement.rate=100000"))
        assert caught.value.exit_code == 2
        assert caught.value.message.startswith("no plan: ")

    def test_rented_devices_are_paid_when_used(self, specs: Make) -> None:
        rented = CLUSTER.replace("count: 8}", "count: 8, rented: true}")
        best = "placement.objective=max_throughput_per_dollar"
        plan = forecast(specs(best, cluster=rented)).plan
        idle = plan.idle["wide"]
        everything = 8 * 5.28 + 8 * 1.85
        assert plan.usd_per_hour == pytest.approx(everything - idle * 1.85)


class TestWhatIf:
    def test_devices_prices_links_and_keys(self, specs: Make) -> None:
        made = apply_changes(
            specs(),
            [
                "h20=+4",
                "BIG=2",
                "price.h800=4.10",
                "link.wide-big=25",
                "link.big-big=7",
                "in_flight=9",
                "batch=128",
                "train.devices=2",
            ],
        )
        big, wide = made.cluster.pools
        assert (big.count, wide.count, big.price, wide.price) == (2, 12, 4.10, None)
        assert [(link.a, link.b, link.gb_per_s) for link in made.cluster.links] == [
            ("big", "wide", 25),
            ("big", "big", 7),
        ]
        assert (made.run.placement.in_flight, made.run.batch.trajectories) == (9, 128)
        assert made.run.placement.train.devices == 2

    def test_a_pool_may_go_and_a_type_may_come(self, specs: Make) -> None:
        made = apply_changes(specs(), ["wide=-8", "h100=16"])
        assert [(p.name, p.device, p.count) for p in made.cluster.pools] == [("big", "H800", 8), ("h100", "H100", 16)]
        assert made.cluster.links == [], "the link of a pool goes with it"

    def test_another_batch_has_the_same_mix(self, specs: Make) -> None:
        quickstart = read_specs()
        made = apply_changes(quickstart, ["batch=96"])
        assert quotas(made.run) == {"frozen_lake": 32, "spell_backward": 64}

    def test_another_model(self, specs: Make, tmp_path: Path) -> None:
        made = apply_changes(specs(), [f"model={tmp_path}"])
        assert made.run.model.config == str(tmp_path)

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ("h20", "is not key=value"),
            ("h2o=+3", "there is no 'h2o'; did you mean 'h20'"),
            ("price.h2=3", "there is no 'h2'"),
            ("h20=+x", "'+x' is no number of devices"),
            ("h20=-9", "pool 'wide' has 8 devices"),
            ("price.h20=cheap", "'cheap' is no number"),
            ("price.h20=-1", "pools.1.price is -1.0 (rule: greater than or equal to 0)"),
            ("link.big-small=3", "'big-small' is no pair of pools"),
            ("link.big-wide=0", "links.0.gb_per_s is 0.0"),
            ("link.big-wide=nan", "links.0.gb_per_s is nan"),
            ("in_flight=0", "placement.in_flight is 0"),
            ("batch=7", "batch.trajectories is 7"),
            ("rate=.inf", "placement.rate is inf"),
            ("rate=3", "placement.rate is 3 (rule: only with `objective: min_cost`"),
            (f"in_flight={10**400}", "(rule: less than or equal to 1"),
            (f"in_flight={'9' * 5000}", "in_flight="),
            (f"batch={10**400}", "(rule: less than or equal to 1"),
            ("in_flight=1e300", "placement.in_flight is 1e+300 (rule: "),
            ("in_flight=true", "placement.in_flight is True (rule: a number)"),
            (f"h20={10**400}", "(rule: less than or equal to 1"),
            (f"h20={'9' * 5000}", "is no number of devices"),
            ("h20=+2000000", "pools.1.count is 2000008 (rule: less than or equal to 1000000)"),
            (f"price.h20={10**400}", "pools.1.price is inf (rule: a finite number)"),
            ("utilisation=1e-300", "placement.utilisation is 1e-300 (rule: greater than or equal to 0.01)"),
        ],
    )
    def test_nonsense_names_itself(self, specs: Make, change: str, expected: str) -> None:
        with pytest.raises(UsageError) as caught:
            apply_changes(specs(), [change])
        assert expected in caught.value.message
        assert caught.value.exit_code == 2
        assert len(caught.value.message) < 500, "no page of digits"
        assert "Input should" not in caught.value.message

    def test_another_objective_has_no_rate(self, specs: Make) -> None:
        frugal = specs("placement.objective=min_cost", "placement.rate=2")
        assert apply_changes(frugal, ["objective=max_throughput"]).run.placement.rate is None
        assert apply_changes(frugal, ["rate=3"]).run.placement.rate == 3
        with pytest.raises(SpecError, match="only with `objective: min_cost`"):
            apply_changes(frugal, ["objective=max_throughput", "rate=3"])

    def test_what_the_plan_is_made_of_is_not_touched(self, specs: Make) -> None:
        made = specs()
        before = made.cluster.model_dump()
        apply_changes(made, ["h20=+4", "price.h800=1"])
        assert made.cluster.model_dump() == before


def test_a_ratio_to_no_cost_at_all_is_refused(specs: Make) -> None:
    """Functions have a price here, and the plan may do without them: that only turns out while solving."""
    free = CLUSTER.replace("count: 8", "count: 8, price: 0")
    free = free.replace("links:", "  - {name: cores, device: cpu, count: 64, price: 0}\nlinks:")
    with pytest.raises(SpecError, match=r"the plan's problem: .*without cost"):
        forecast(specs("placement.objective=max_throughput_per_dollar", cluster=free + "functions: {price: modal}\n"))


class TestGivenAndIgnored:
    def test_given_engines_go_to_gpus_however_many_cores_there_are(self, specs: Make) -> None:
        """Also without `device`: an engine on a core beside idle GPUs is nobody's wish."""
        pools = CLUSTER.replace("links:", "  - {name: cores, device: cpu, count: 512}\nlinks:")
        found = forecast(specs(cluster=pools + "engines: {prefill: 2, decode: 3}\n"))
        assert {a.pool for a in found.plan.assignments} <= {"big", "wide"}
        assert len(found.plan.assignments) == 6

    @pytest.mark.slow  # solves
    def test_threads_say_nothing_to_a_computed_plan(self, specs: Make) -> None:
        found = forecast(specs(cluster=CLUSTER + "trainer: {threads: 4}\n"))
        assert (
            "trainer.threads is 4: ignored, since the plan is computed; placement.train.devices says it there"
            in found.notes
        )
        assert not [note for note in forecast(specs()).notes if "threads" in note]


SHIPPED = [
    ("agentic-math-32b", "rollart-96h800-32h20"),
    ("agentic-math-32b", "aws-mix"),
    ("moe-235b", "3000-gpus"),
    ("code-agent-32b", "32h800-16h20"),
    ("quickstart", "one-h200"),
    ("quickstart", "local"),
    ("code-agent", "local"),
    ("quickstart", "local-vllm"),
    ("quickstart", "ray-fake"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "cluster"), SHIPPED)
def test_every_shipped_cluster_has_a_plan(run: str, cluster: str) -> None:
    """Slow: solves."""
    found = forecast(read_specs(builtin(f"runs/{run}.yaml"), builtin(f"clusters/{cluster}.yaml")))
    assert found.plan.of(Role.TRAINER)
    assert found.plan.assignments
    if cluster not in ("one-h200", "local", "local-vllm", "ray-fake"):
        assert found.plan.placement is not None
        assert found.plan.placement.rate > 0


def test_every_shipped_cluster_is_tried() -> None:
    assert {path.stem for path in builtin("clusters").iterdir()} == {cluster for _, cluster in SHIPPED}
    assert {path.stem for path in builtin("runs").iterdir()} == {run for run, _ in SHIPPED}


@pytest.mark.slow
def test_given_engines_without_profiles_load_neither_scipy_nor_numpy() -> None:
    """Slow: a process of its own."""
    code = (
        "import sys\nfrom rollart.settings.resolve import resolve_files\nresolve_files()\n"
        "print([m for m in ('numpy', 'scipy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
