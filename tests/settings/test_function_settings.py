"""Settings of the function layer in a cluster spec: what is wrong is said with its place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollart.errors import SpecError
from rollart.settings.cluster import HttpFunction, LocalFunctions
from rollart.settings.functions import MODELS, settings_model
from rollart.settings.load import load_cluster
from rollart.settings.resolve import resolve_files, resolve_saved
from serverless.secrets import SecretSource
from tests.settings.conftest import RUN

Write = Callable[..., Path]

CLUSTER = """\
name: c
pools: [{name: p, device: cpu, count: 4}]
engines: {count: 1}
functions:
"""


def cluster(write: Write, functions: str) -> Path:
    return write(CLUSTER + "".join(f"  {line}\n" for line in functions.splitlines()), "cluster.yaml")


@pytest.mark.parametrize(
    ("functions", "place", "expected"),
    [
        ("pipeline:\n  hedge: {budget: 2}", "6:21", "functions.pipeline.hedge.budget is 2 (rule: less than or equal"),
        (
            "pipeline:\n  hedge: {budgt: 0.1}",
            "6:13",
            "'budgt' in functions.pipeline.hedge (rule: only its own keys; did you mean 'budget'?)",
        ),
        ("pipeline: {hedg: {}}", "5:14", "did you mean 'hedge'?"),
        ("pipeline: {limits: {min_s: 5, max_s: 2}}", "5:22", "min_s=5 is more than max_s=2"),
        ("scaling: {enabld: true}", "5:13", "'enabld' in functions.scaling (rule: only its own keys; did you mean"),
        ("aws_lambda: {architecture: mips}", "5:30", "functions.aws_lambda.architecture is 'mips'"),
        ("aws_lambda: {regoin: x}", "5:16", "did you mean 'region'?"),
        ("modal: {keep: many}", "5:17", "functions.modal.keep is 'many'"),
        ("modal: {prefx: a}", "5:11", "did you mean 'prefix'?"),
        ("http: {judge: 'ftp://x'}", "5:17", "functions.http.judge is 'ftp://x' (rule: an http or https URL)"),
        ("http: {judge: {url: 'http://x', tokn_env: A}}", "5:35", "did you mean 'token_env'?"),
        ("http: {judge: {url: 'http://x', token_env: A, secret_env: B}}", "5:17", "not both"),
        ("local: {rehearse: azure}", "5:21", "functions.local.rehearse is 'azure' (rule: 'aws_lambda' or 'modal')"),
        ("local: {runtme: rollart}", "5:11", "did you mean 'runtime'?"),
        ("backend: lambda", "5:12", "did you mean 'aws_lambda'?"),
        ("price: lambda", "5:10", "functions.price is 'lambda' (rule: a provider of the price list"),
    ],
)
def test_wrong_settings_name_their_place(write: Write, functions: str, place: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_cluster(cluster(write, functions))
    assert expected in str(caught.value)
    assert f"cluster.yaml:{place}" in str(caught.value)


def test_every_wrong_one_is_told_at_once_in_the_order_of_the_file(write: Write) -> None:
    path = cluster(write, "price: x\npipeline: {hedge: {budget: 2}, retry: {max_attempts: 0}}\nmodal: {keep: a}")
    with pytest.raises(SpecError) as caught:
        load_cluster(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert ["price" in lines[0], "budget" in lines[1], "max_attempts" in lines[2], "modal" in lines[3]] == [True] * 4


def test_an_override_names_itself(write: Write) -> None:
    with pytest.raises(SpecError, match=r"override 'functions.pipeline.hedge.budget=3': .*budget is 3"):
        load_cluster(cluster(write, "backend: local"), ["functions.pipeline.hedge.budget=3"])


def test_a_saved_run_is_checked_too(write: Write) -> None:
    resolved = resolve_files(write(), cluster(write, "local: {rehearse: lambda, seed: 3}\nhttp: {f: 'http://h/f'}"))
    saved = write(resolved.to_yaml(), "resolved.yaml")
    again = resolve_saved(saved)
    assert again == resolved
    assert again.cluster.functions.local == LocalFunctions(runtime="rollart", rehearse="aws_lambda", seed=3)
    assert again.cluster.functions.http == {"f": HttpFunction(url="http://h/f")}
    with pytest.raises(SpecError, match=r"functions\.pipeline"):
        resolve_saved(saved, ["cluster.functions.pipeline.cash.enabled=false"])


def test_a_price_list_that_is_not_there(write: Write) -> None:
    with pytest.raises(SpecError, match=r"prices is 'nowhere.yaml' \(rule: a file"):
        load_cluster(write(CLUSTER.replace("functions:", "prices: nowhere.yaml"), "cluster.yaml"))


def test_a_rehearsal_is_in_the_notes_of_the_plan(write: Write) -> None:
    run = write()
    notes = resolve_files(run, cluster(write, "local: {rehearse: modal}")).notes
    assert any("rehearsal" in note and "modal" in note for note in notes)
    assert not resolve_files(run, cluster(write, "backend: http\nlocal: {rehearse: modal}")).notes


def test_a_function_slower_than_rewards_are_waited_for_is_in_the_notes(write: Write) -> None:
    where = cluster(write, "backend: local")
    for limit, expected in ((60, []), (61, ["functions.exact may run 61 s"])):
        run = write(RUN.replace("handler: exact", f"handler: exact, timeout_s: {limit}"))
        notes = [note.partition(",")[0] for note in resolve_files(run, where).notes if "leases.reward_s" in note]
        assert notes == expected


@pytest.mark.slow  # a process of its own
def test_no_model_needs_a_providers_library() -> None:
    assert SecretSource.model_config["extra"] == "forbid"  # the values of `secrets`, whose keys are users' variables
    assert all(settings_model(key).model_config["extra"] == "forbid" for key in MODELS if key != "secrets")
    code = (
        "import sys\nfrom rollart.settings.functions import MODELS, settings_model\n"
        "[settings_model(key) for key in MODELS]\n"
        "print([m for m in ('boto3', 'aiobotocore', 'modal', 'aiohttp', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
