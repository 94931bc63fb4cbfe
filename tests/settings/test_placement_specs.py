"""Hardware, links, profiles and wishes in specs: what is wrong says where, what is right becomes placer's values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from placement.problem import DomainProfile, Quantity
from placement.types import Role
from rollart.errors import SpecError
from rollart.settings.load import builtin, load_cluster, load_prices, load_run
from rollart.settings.planning import affinity_of, function_price, model_config, model_name, pools_of, profiles_of
from rollart.settings.prices import PriceList
from rollart.settings.rules import quotas

Write = Callable[..., Path]

CLUSTER = """\
name: c
devices:
  - {name: H20, memory_gb: 141, source: the 141 GB variant}
  - {name: mine, base: H100, tflops_bf16: 500, source: my own bench}
pools:
  - {name: a, device: H20, count: 8, memory_gb: 90}
  - {name: b, device: mine, count: 8, rented: true, price: 2, devices_per_host: 4}
  - {name: c, device: A100, count: 8}
links:
  - {a: a, b: b, gb_per_s: 25, latency_ms: 0.5}
"""

PROFILE = """
    profile:
      turns: {mean: 6, p90: 8}
      first_tokens: 40
      new_tokens: 5
      output_tokens: 3
      environment: {wait_s: 0.5}
      reward: {seconds: 2}
"""


@pytest.fixture
def prices() -> PriceList:
    return load_prices(builtin("prices.yaml"))


class TestCluster:
    def test_figures_come_from_the_pool_then_the_cluster_then_the_catalogue(
        self, write: Write, prices: PriceList
    ) -> None:
        a, b, c = pools_of(load_cluster(write(CLUSTER, "c.yaml")), prices)
        assert (a.device.name, a.device.memory_gb, a.device.tflops_bf16) == ("H20", 90, 148)
        assert (b.device.tflops_bf16, b.device.memory_gb, b.device.devices_per_host) == (500, 80, 4)
        assert "my own bench" in b.device.source
        assert (b.rented, b.usd_per_device_hour, a.rented) == (True, 2, False)
        assert c.device.name == "A100-80", "one type has one name, however it is written"
        assert c.usd_per_device_hour == 1.39

    @pytest.mark.parametrize(
        ("old", "new", "expected"),
        [
            ("gb_per_s: 25", "gb_per_s: 0", "c.yaml:10:28: links.0.gb_per_s is 0 (rule: greater than or equal to"),
            ("gb_per_s: 25", "gb_per_s: .inf", "links.0.gb_per_s is inf (rule: a finite number)"),
            ("gb_per_s: 25", "gb_per_s: .nan", "links.0.gb_per_s is nan (rule: a finite number)"),
            ("latency_ms: 0.5", "latency_ms: -1", "links.0.latency_ms is -1 (rule: greater than or equal to 0)"),
            ("a: a, b: b", "a: aa, b: b", "c.yaml:10:9: links.0.a is 'aa' (rule: the name of a pool"),
            ("price: 2", "price: -2", "c.yaml:7:60: pools.1.price is -2 (rule: greater than or equal to 0)"),
            ("tflops_bf16: 500", "tflops_bf16: .nan", "devices.1.tflops_bf16 is nan (rule: a finite number)"),
            ("memory_gb: 141", "memory_tb_per_s: 0", "devices.0.memory_tb_per_s is 0 (rule: greater than or equal to"),
            ("base: H100", "base: H10", "c.yaml:4:24: devices.1.base is 'H10' (rule: a type of the catalogue; did you"),
            ("device: A100", "device: A10O", "c.yaml:8:23: pool 'c': device is 'A10O' (rule: for a computed plan, a"),
            ("name: H20, memory", "name: mine, memory", "devices.0.name is 'mine' (rule: names are unique"),
            ("latency_ms: 0.5}", "latency_ms: 0.5}\n  - {a: b, b: a, gb_per_s: 1}", "c.yaml:11:5: the link of 'b' and"),
            ("links:", "engines: {prefill: 2}\nlinks:", "engines.prefill is given alone (rule: with engines.decode)"),
            ("count: 8", "count: 100000000", "pools.0.count is 100000000 (rule: less than or equal to 1000000)"),
            ("count: 8", f"count: {10**400}", "(rule: less than or equal to 1"),
            ("count: 8", f"count: {'9' * 5000}", "c.yaml:6:"),
            ("count: 8", "count: true", "pools.0.count is True (rule: a number)"),
            ("price: 2", "price: 1e7", "pools.1.price is 10000000.0 (rule: less than or equal to 1000000)"),
            ("price: 2", f"price: {10**400}", "(rule: less than or equal to 1"),
            ("gb_per_s: 25", "gb_per_s: 1e300", "(rule: less than or equal to 1000000000)"),
            ("latency_ms: 0.5", "latency_ms: 1e9", "(rule: less than or equal to 1000000)"),
            ("tflops_bf16: 500", "tflops_bf16: 1e-300", "devices.1.tflops_bf16 is 1e-300 (rule: greater than"),
            ("links:", "engines: {count: 1000000000}\nlinks:", "(rule: less than or equal to 100000)"),
            ("links:", "engines: {count: 0}\nlinks:", "engines.count is 0 (rule: greater than or equal to 1)"),
        ],
    )
    def test_nonsense_has_a_place(self, write: Write, old: str, new: str, expected: str) -> None:
        assert old in CLUSTER
        path = write(CLUSTER.replace(old, new, 1), "c.yaml")
        with pytest.raises(SpecError) as caught:
            load_cluster(path)
        assert expected in caught.value.message.replace(str(path), "c.yaml")

    def test_an_unknown_type_will_do_where_nothing_is_computed(self, write: Write) -> None:
        text = "name: c\npools: [{name: p, device: TPU, count: 2, price: 1}]\nengines: {count: 1}\n"
        assert load_cluster(write(text, "c.yaml")).engines.fixed

    def test_what_functions_bill(self, write: Write, prices: PriceList) -> None:
        found = function_price(load_cluster(write(CLUSTER + "functions: {price: modal}\n", "c.yaml")), prices)
        assert found is not None
        assert (found.provider, found.usd_per_core_s, found.charges_idle) == ("modal", 0.0000131, True)
        assert (found.usd_per_gpu_s["L4"], found.usd_per_gpu_s["RTX-PRO-6000"]) == (0.000222, 0.000842)
        assert found.usd_per_gb_s == pytest.approx(0.00000222 / 1.073741824)
        local = function_price(load_cluster(write(CLUSTER, "c.yaml")), prices)
        assert local is not None
        assert local.usd_per_million_requests == 0.20
        with pytest.raises(SpecError, match="did you mean 'modal'"):
            function_price(load_cluster(write(CLUSTER + "functions: {price: modall}\n", "c.yaml")), prices)


class TestProfiles:
    def profile(self, write: Write, text: str = PROFILE) -> Path:
        run = (Path(__file__).parent / "run.yaml").read_text()
        return write(run.replace("    rewards:", text.rstrip("\n").lstrip("\n") + "\n    rewards:"))

    def test_a_number_is_a_mean(self, write: Write) -> None:
        run = load_run(self.profile(write))
        (found,) = profiles_of(run, quotas(run))
        assert (found.turns, found.new_tokens, found.prompt) == (Quantity(6, p90=8), Quantity(5), Quantity(40))
        assert (found.environment.wait_s, found.weight, found.source) == (0.5, 16.0, "given")
        assert found.reward is not None
        assert found.reward.seconds == 2

    @pytest.mark.parametrize(
        ("old", "new", "expected"),
        [
            ("turns: {mean: 6, p90: 8}", "turns: 0", "domains.0.profile.turns is 0 (rule: greater than or equal to 1)"),
            ("turns: {mean: 6, p90: 8}", "turns: .nan", "domains.0.profile.turns is nan (rule: a finite number)"),
            ("turns: {mean: 6, p90: 8}", "turns: many", "domains.0.profile.turns is 'many' (rule: a number, or"),
            ("      turns: {mean: 6, p90: 8}\n", "", "key 'turns' is missing in domains.0.profile"),
            ("turns: {mean: 6", "turns: {mean: 60", "domain 'lake' has turns 60 (rule: at most its max_turns, 8)"),
            ("output_tokens: 3", "output_tokens: 9", "has output_tokens 9 (rule: at most its max_tokens, 4)"),
            ("new_tokens: 5", "new_tokens: 50", "by its profile (rule: at most model.context, 128)"),
            ("first_tokens: 40", "first_tokens: 0", "has first_tokens 0 (rule: a first prompt above 0 tokens)"),
            ("seconds: 2", "seconds: 0", "domains.0.profile.reward.seconds is 0 (rule: greater than or equal to"),
            (
                "{mean: 6, p90: 8}",
                "{mean: 6, p50: 6, p90: 4}",
                "run.yaml:11:37: domain 'lake' has turns p90 4 (rule: at",
            ),
            ("wait_s: 0.5", "wait_s: 1e9", "environment.wait_s is 1000000000.0 (rule: less than or equal to 1000000)"),
            ("wait_s: 0.5", "wait_s: true", "environment.wait_s is True (rule: a number)"),
            ("wait_s: 0.5", "wait_s: -1", "domains.0.profile.environment.wait_s is -1 (rule: greater than or equal"),
        ],
    )
    def test_nonsense_has_a_place(self, write: Write, old: str, new: str, expected: str) -> None:
        assert old in PROFILE
        path = self.profile(write, PROFILE.replace(old, new))
        with pytest.raises(SpecError) as caught:
            load_run(path)
        assert expected in caught.value.message
        assert caught.value.message.startswith(f"{path}:")

    def test_what_is_measured_counts_less_than_what_is_given_and_more_than_bounds(self, write: Write) -> None:
        measured = DomainProfile("lake", Quantity(2), Quantity(7), Quantity(2), weight=3, source="run x")
        run = load_run(write())
        (found,) = profiles_of(run, quotas(run), [measured])
        assert (found.turns.mean, found.source, found.weight) == (2, "run x", 16.0)
        run = load_run(self.profile(write))
        assert profiles_of(run, quotas(run), [measured])[0].source == "given"

    def test_without_either_every_trajectory_is_as_long_as_it_may_be(self, write: Write) -> None:
        run = load_run(write())
        (found,) = profiles_of(run, quotas(run))
        assert found.source == "assumed"
        assert (found.turns.mean, found.output_tokens.mean) == (8, 4)
        assert found.total_tokens == pytest.approx(run.model.context)
        long = load_run(write(), ["domains.lake.max_tokens=100", "domains.lake.max_turns=50"])
        assert profiles_of(long, quotas(long))[0].turns.mean == 1, "the context ends it"


class TestAffinity:
    def found(
        self, write: Write, prices: PriceList, affinity: str, **usable: str
    ) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
        cluster = load_cluster(write(CLUSTER, "c.yaml"))
        run = load_run(write(), [f"hw_affinity={affinity}", "domains.lake.tag=wet"])
        pools = pools_of(cluster, prices)
        return affinity_of(run, pools, {p.name: usable.get(p.name) for p in pools})

    def test_a_tag_names_a_pool_or_a_type_and_default_is_for_the_others(self, write: Write, prices: PriceList) -> None:
        assert self.found(write, prices, "{wet: b}") == ({"lake": ("b",)}, ())
        assert self.found(write, prices, "{wet: A100-80GB}") == ({"lake": ("c",)}, ())
        assert self.found(write, prices, "{default: H20}") == ({"lake": ("a",)}, ())
        assert self.found(write, prices, "{}") == ({}, ())

    def test_a_type_that_is_not_here_falls_back_and_says_so(self, write: Write, prices: PriceList) -> None:
        found, notes = self.found(write, prices, "{wet: H800}")
        assert found == {}
        assert notes == ("hw_affinity: lake prefers H800, but the cluster has none: any pool may take it",)

    def test_a_pool_that_cannot_serve_the_model_falls_back(self, write: Write, prices: PriceList) -> None:
        found, notes = self.found(write, prices, "{wet: a}", a="it is too small")
        assert found == {}
        assert "it is too small" in notes[0]

    def test_typing_errors_are_no_preferences(self, write: Write, prices: PriceList) -> None:
        with pytest.raises(SpecError, match="did you mean 'H20'"):
            self.found(write, prices, "{wet: H2O}")
        with pytest.raises(SpecError, match=r"hw_affinity names 'weet'.*did you mean 'wet'"):
            self.found(write, prices, "{weet: a}")


class TestModel:
    def test_the_config_may_be_inline_a_file_or_made(self, write: Write, tmp_path: Path) -> None:
        run = load_run(write(), ["model.config={hidden_size: 7}"])
        assert model_config(run, str(tmp_path)) == {"hidden_size": 7}
        write('{"hidden_size": 8}', "config.json")
        run = load_run(write(), ["model.config=config.json"])
        assert model_config(run, str(tmp_path)) == {"hidden_size": 8}
        assert model_config(load_run(write()), ".") == {"hidden_size": 64}
        run = load_run(write(), ["model.init=rollart.quickstart.policy_config:policy_config"])
        assert model_config(run, ".")["hidden_size"] == 96
        assert model_name(run) == "rollart.quickstart.policy_config:policy_config"

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("model.config=none.json", "model.config: .*none.json cannot be read: No such file"),
            ("model.init=rollart.errors:nothing", "model.init 'rollart.errors:nothing' gives no configuration: Attr"),
            ("model.init=os:getcwd", "returned str"),
        ],
    )
    def test_what_is_no_config(self, write: Write, tmp_path: Path, override: str, expected: str) -> None:
        with pytest.raises(SpecError, match=expected):
            model_config(load_run(write(), [override]), str(tmp_path))

    def test_a_plan_needs_no_weights_and_a_run_does(self, write: Write) -> None:
        assert load_run(write(), ["model={config: {hidden_size: 7}, context: 128}"]).model.path is None
        with pytest.raises(SpecError, match="a plan alone is content with 'config'"):
            load_run(write(), ["model={context: 128}"])


def test_prefill_and_decode_engines_by_number(write: Write) -> None:
    from rollart.settings.resolve import resolve_files

    cluster = write("name: c\npools: [{name: p, count: 4}]\nengines: {prefill: 1, decode: 2}\n", "c.yaml")
    plan = resolve_files(write(), cluster).plan
    assert [a.name for a in plan.assignments] == ["prefill-0", "decode-0", "decode-1", "trainer-0"]
    assert plan.of(Role.ENGINE) == ()
