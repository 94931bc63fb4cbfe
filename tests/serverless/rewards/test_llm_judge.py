"""The judge with its real clients, and in real workers, against an endpoint that keeps its own bill."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rollart.testing.functions import Meter
from serverless.deploy.package import Package, build
from serverless.pipeline.offload import Offload
from serverless.rewards.llm_judge import LlmJudge
from serverless.spec import FunctionSpec
from serverless.types import FaultKind, InfraFault, Item, Scored, Throttle
from serverless.usage import recording, total
from serverless.workers.local import LocalBackend
from tests.serverless.judge_server import Answer, JudgeServer

pytestmark = pytest.mark.slow  # imports of the clients take two seconds of CPU, and workers are processes

pytest.importorskip("openai", reason="the extra `judge` is not installed")
pytest.importorskip("anthropic", reason="the extra `judge` is not installed")

CRITERIA = {"good": "The answer is good."}


def item(completion: str, name: str = "i") -> Item:
    return Item(name, ({"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": completion}), "4")


def verdict(score: float) -> dict[str, Any]:
    return {"reasoning": "because", "scores": {"good": score}}


def url(server: JudgeServer, api: str) -> str:
    return server.url if api == "openai" else server.url.removesuffix("/v1")


UNANSWERED = [
    (Answer(refusal="I cannot."), FaultKind.BAD_ANSWER, False, "refused: I cannot."),
    (Answer(text='{"sc', finish="CUT"), FaultKind.BAD_ANSWER, True, "cut off at 64 tokens"),
    (Answer(verdict(11)), FaultKind.BAD_ANSWER, True, "11, outside its scale"),
    (Answer(text="8 of 10"), FaultKind.BAD_ANSWER, True, "gave no verdict"),
    (Answer(raw="<html>gateway</html>"), FaultKind.BAD_ANSWER, True, "another form"),
    (Answer(status=500, error={"message": "boom"}), FaultKind.UNAVAILABLE, True, "(500): boom"),
    (Answer(status=529, error={"message": "overloaded"}), FaultKind.UNAVAILABLE, True, "(529): overloaded"),
    (Answer(status=400, error={"message": "unknown field"}), FaultKind.ENVIRONMENT, False, "(400): unknown field"),
    (Answer(status=404, error={"message": "no model m"}), FaultKind.ENVIRONMENT, False, "no model m"),
    (Answer(verdict(8), after_s=30.0), FaultKind.TIMEOUT, True, "in 0.3 s (request_timeout_s)"),
    (
        Answer(status=429, error={"message": "slow down"}, headers={"retry-after": "7"}),
        FaultKind.THROTTLED,
        True,
        "(429): slow down",
    ),
]


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_each_answer_of_the_real_client_is_a_score_or_a_fault(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients ask once each: a retry of theirs would be a request without an answer."""
    monkeypatch.setenv("JUDGE_API_KEY", "sk-the-right-key")
    cut = {"openai": "length", "anthropic": "max_tokens"}[api]
    answers = [Answer(verdict(9), cached=3), *(answer for answer, *_ in UNANSWERED)]
    given = [Answer(**{**vars(a), "finish": cut}) if a.finish == "CUT" else a for a in answers]

    async def main() -> None:
        async with JudgeServer(given, key="sk-the-right-key") as server:
            judge = LlmJudge(
                model="m", api=api, url=url(server, api), criteria=CRITERIA, max_tokens=64, request_timeout_s=0.3
            )
            used = recording()
            assert await judge(item("4")) == Scored(0.9, {"good": 0.9})
            for _, kind, retryable, detail in UNANSWERED:
                fault = await judge(item("4"))
                assert isinstance(fault, InfraFault)
                assert (fault.kind, fault.retryable) == (kind, retryable), fault
                assert detail in fault.detail
            assert (fault.throttle, fault.retry_after_s) == (Throttle.RATE, 7.0)
            assert total(used) == [server.total], "the endpoint's own count, answers without a verdict included"
            monkeypatch.setenv("JUDGE_API_KEY", "sk-another-key")
            asked = len(server.requests)
            fault = await LlmJudge(model="m", api=api, url=url(server, api), criteria=CRITERIA)(item("4"))
            assert isinstance(fault, InfraFault)
            assert (fault.kind, fault.retryable) == (FaultKind.UNAVAILABLE, False)
            assert "credentials" in fault.detail
            assert "sk-" not in fault.detail
            assert len(server.requests) == asked

    asyncio.run(main())


def packed(server: JudgeServer, **settings: Any) -> Package:
    arguments = {"model": "m", "url": server.url, "key_env": "", "criteria": CRITERIA, **settings.pop("arguments", {})}
    given = {"secrets": (), "concurrency": 3, "batch": {"max_items": 2}, **settings}
    return build(
        FunctionSpec(name="judge", source="serverless.rewards.llm_judge:LlmJudge", arguments=arguments, **given)
    )


def test_workers_bill_every_request_once_and_share_one_limit() -> None:
    """Forty items, eight of them different: equal ones have one verdict and one bill. 60 requests a minute for all
    workers together: a burst of six, then 54 a minute, for which items wait in the queue. A verdict that fails is asked
    for again."""
    completions = [f"answer {n % 8}" for n in range(40)]
    asked = 0

    def judge(system: str, user: str) -> Answer:
        nonlocal asked
        asked += 1
        number = int(user.partition("answer ")[2][0])
        return Answer(text="well") if asked == 3 else Answer(verdict(number))

    async def main() -> None:
        meter = Meter()
        async with JudgeServer(judge) as server:
            one = packed(server, arguments={"requests_per_minute": 60, "wait_s": 0.2})
            async with LocalBackend(meter=meter) as backend, Offload([one], backend, meter=meter) as offload:
                began = time.monotonic()
                outcomes = await asyncio.gather(
                    *(offload.submit("judge", item(c, f"i{n}"), 60.0) for n, c in enumerate(completions))
                )
                seconds = time.monotonic() - began
            assert [o.value for o in outcomes if isinstance(o, Scored)] == [n % 8 / 10 for n in range(40)]
            assert len(server.requests) == 9
            assert meter.usage["judge"].tokens == [server.total]
            assert server.total.requests == 9
            assert seconds >= 2 / (54 / 60), "the seventh and eighth wait, whichever workers they are in"

    asyncio.run(main())


def test_a_class_of_ones_own_is_a_judge_with_its_settings_under_awss_runtime(tmp_path: Any) -> None:
    """Its package has all that it needs of ours: this runtime finds nothing else."""
    pytest.importorskip("awslambdaric", reason="the extra `providers` is not installed")

    async def main() -> None:
        async with JudgeServer([Answer(verdict(4))]) as server:
            (tmp_path / "mine.py").write_text(
                "from rollart import reward\n"
                "from serverless.rewards.llm_judge import LlmJudge\n\n"
                '@reward(takes="item", stateless=True, deterministic=False, requirements=("openai",))\n'
                "class Mine(LlmJudge):\n"
                "    def __init__(self, *, url):\n"
                '        super().__init__(model="m", url=url, key_env="", criteria={"good": "It is."})\n'
            )
            one = build(
                FunctionSpec(name="mine", source="mine.py", arguments={"url": server.url}, init_timeout_s=60),
                base=tmp_path,
            )
            async with LocalBackend(runtime="awslambdaric") as backend, Offload([one], backend) as offload:
                assert await offload.submit("mine", item("4"), 60.0) == Scored(0.4, {"good": 0.4})
            assert server.total.requests == 1

    asyncio.run(main())
