"""References to versions of deployed functions."""

from __future__ import annotations

import random

import pytest

from serverless.deploy.changes import spec_lines, weight_lines
from serverless.errors import SpecInvalid, UnknownFunction
from serverless.providers.base import DeployedFunction, LiveVersions, check_canary, find_version, split_reference
from serverless.providers.modal_client import DeploymentTags
from serverless.spec import FunctionSpec


def versions(live: LiveVersions) -> list[DeployedFunction]:
    """Three versions of `f`, newest first."""
    digests = {"3": "cccc" * 16, "2": "1234" * 16, "1": "aaaa" * 16}
    return [
        DeployedFunction(
            "f",
            "local",
            digest,
            n,
            n == live.current,
            weight=live.of(n),
            aliases=live.aliases(n) + ("run-x",) * (n == "1"),
        )
        for n, digest in digests.items()
    ]


@pytest.mark.parametrize(
    ("wanted", "number"),
    [("live", "2"), ("canary", "3"), ("1", "1"), ("3", "3"), ("aaaa", "1"), ("1234", "2"), ("run-x", "1")],
)
def test_a_version_is_named_by_alias_number_or_digest(wanted: str, number: str) -> None:
    known = versions(LiveVersions("2", "3", 0.25))
    assert find_version("f", known, wanted, draw=0.0).provider_version == number


@pytest.mark.parametrize("wanted", ["4", "aaa", "bbbb", "run-y", "canary"])
def test_a_version_that_is_not_there_is_refused_with_those_that_are(wanted: str) -> None:
    with pytest.raises(UnknownFunction, match=r"has no version.*cccccccccccc \(3\), 123412341234 \(2, live\)"):
        find_version("f", versions(LiveVersions("2")), wanted, draw=0.0)


def test_draws_follow_the_weights() -> None:
    known, rng = versions(LiveVersions("1", "3", 0.25)), random.Random(7)
    drawn = [find_version("f", known, "live", draw=rng.random()).provider_version for _ in range(4000)]
    assert set(drawn) == {"1", "3"}
    assert abs(drawn.count("3") - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5, "four standard deviations"
    edges = [find_version("f", known, "live", draw=u).provider_version for u in (0.0, 0.7499, 0.75, 0.9999)]
    assert edges == ["1", "1", "3", "3"]


def test_a_reference_without_a_version_is_of_the_live_one() -> None:
    assert [split_reference(text) for text in ("f", "f@3", "f@live")] == [("f", "live"), ("f", "3"), ("f", "live")]


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0, float("nan")])
def test_a_canary_leaves_calls_to_the_current_version(share: float) -> None:
    with pytest.raises(SpecInvalid, match="above 0 and below 1"):
        check_canary("f", share)


def test_the_weights_of_a_modal_app_are_in_its_tags() -> None:
    tags = DeploymentTags().added(1, "aa" * 32, 1.0, keep=1, canary=0.5)
    assert tags.weighted == (1,), "the first version gets all calls"
    tags = tags.added(2, "bb" * 32, 2.0, keep=1, canary=0.1)
    assert DeploymentTags.read(tags.tags()) == tags
    assert (tags.weighted, tags.weight) == ((1, 2), 0.1)
    later = tags.added(3, "cc" * 32, 3.0, keep=1, canary=0.2).added(4, "dd" * 32, 4.0, keep=1, canary=0.3)
    assert (set(later.versions), later.weighted) == ({1, 3, 4}, (1, 4)), "the live one is kept, whatever its age"
    assert later.pointed(4).weighted == (4,)
    assert "rollart-canary" not in later.pointed(4).tags()


@pytest.mark.parametrize("changes", [{"rollart-canary": "9"}, {"rollart-weight": "1.5"}, {"rollart-canary": "1"}])
def test_tags_that_make_no_sense_are_no_canary(changes: dict[str, str]) -> None:
    tags = DeploymentTags().added(1, "aa" * 32, 1.0, keep=1).added(2, "bb" * 32, 2.0, keep=1, canary=0.1)
    assert DeploymentTags.read(tags.tags() | changes).weighted == (1,)


def test_changed_settings_are_listed_by_key() -> None:
    before = FunctionSpec(name="f", source="f.py", memory_mb=128, requirements=("a==1", "b==2"))
    after = before.model_copy(update={"memory_mb": 256, "requirements": ("b==2", "c==3"), "gpu": "L4"})
    assert spec_lines(before, after) == ["memory_mb: 128 -> 256", "gpu: none -> L4", "requirements: -a==1 +c==3"]
    assert spec_lines(before, before) == []


def test_the_lines_of_a_deployment_name_what_ends() -> None:
    known = versions(LiveVersions("2", "3", 0.25))[:2]
    assert weight_lines(known, "dddd" * 16, 0.0) == (
        "version: 123412341234 -> dddddddddddd",
        "canary: cccccccccccc (25%) -> none",
    )
    assert weight_lines(known, "cccc" * 16, 0.0) == ("version: 123412341234 -> cccccccccccc",)
    assert weight_lines(known, "1234" * 16, 0.0) == ("canary: cccccccccccc (25%) -> none",)
    assert weight_lines(known, "1234" * 16, 0.5) == ()
    assert weight_lines(known, "cccc" * 16, 0.25) == ()
    assert weight_lines(known, "cccc" * 16, 0.5)[0] == "canary: cccccccccccc (0.25) -> cccccccccccc (0.5)"
