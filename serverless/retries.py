"""The retries of everything but calls of functions, which `serverless.pipeline` retries: one table of policies.

`tenacity` makes the attempts; a policy says how many there are and how long the pauses between them. On an event loop
the loop's clock counts and `asyncio.sleep` pauses, so that policies run on virtual time. In a thread the caller gives
the function that pauses, so that it can be interrupted. `python -m serverless.retries` prints the table of the docs.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")
When = type[Exception] | tuple[type[Exception], ...] | Callable[[BaseException], bool]
"""The errors after which another attempt is made: types, or a predicate."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `attempts` attempts, and none later than the caller's time limit where it gives one. The pause before
    attempt n + 1 is min(longest_s, first_s * factor^(n - 1)), with `jitter` over all of it or its upper half."""

    operation: str
    errors: str
    attempts: int
    """0: the caller's time limit alone, or the lease that it holds, ends the attempts."""
    first_s: float
    longest_s: float
    factor: float = 2.0
    jitter: Literal["none", "half", "full"] = "none"

    def pause_s(self, failures: int, rng: random.Random | None = None) -> float:
        """Seconds to wait after `failures` failed attempts in a row."""
        # The exponent is bounded, since a power of a float overflows.
        longest = min(self.longest_s, self.first_s * self.factor ** min(failures - 1, 64))
        if self.jitter == "none":
            return longest
        least = longest / 2.0 if self.jitter == "half" else 0.0
        return (rng or random.Random()).uniform(least, longest)

    @property
    def total_s(self) -> float:
        """The longest sum of all pauses, in seconds; infinite without a number of attempts."""
        if not self.attempts:
            return math.inf
        return sum(min(self.longest_s, self.first_s * self.factor**n) for n in range(self.attempts - 1))

    async def run(
        self,
        attempt: Callable[[], Awaitable[T]],
        when: When,
        *,
        within_s: float = math.inf,
        rng: random.Random | None = None,
        failed: Callable[[BaseException, int], Awaitable[None]] | None = None,
    ) -> T:
        """The result of the first attempt that succeeds, else the last error. No attempt begins later than `within_s`
        seconds from now: the last pause is cut to that. `failed` is called with the error and the number of the attempt
        before each pause."""
        import tenacity

        loop = asyncio.get_running_loop()
        ends = loop.time() + within_s

        def wait(state: RetryCallState) -> float:
            return max(0.0, min(self.pause_s(state.attempt_number, rng), ends - loop.time()))

        async def before_sleep(state: RetryCallState) -> None:
            if failed is not None and state.outcome is not None and (error := state.outcome.exception()) is not None:
                await failed(error, state.attempt_number)

        async def once() -> T:
            return await attempt()

        return await tenacity.AsyncRetrying(
            retry=_condition(when),
            stop=lambda state: self._last(state.attempt_number) or loop.time() >= ends,
            wait=wait,
            sleep=asyncio.sleep,
            before_sleep=before_sleep,
            reraise=True,
        )(once)

    def run_blocking(self, attempt: Callable[[], T], when: When, *, pause: Callable[[float], object]) -> T:
        """The same in a thread. `pause` waits for some seconds, and raises if the caller shall stop."""
        import tenacity

        def sleep(seconds: float) -> None:
            pause(seconds)

        return tenacity.Retrying(
            retry=_condition(when),
            stop=lambda state: self._last(state.attempt_number),
            wait=lambda state: self.pause_s(state.attempt_number),
            sleep=sleep,
            reraise=True,
        )(attempt)

    def _last(self, attempt: int) -> bool:
        return 0 < self.attempts <= attempt


def _condition(when: When) -> Callable[[RetryCallState], bool]:
    if isinstance(when, (type, tuple)):
        types = when
        return lambda state: isinstance(state.outcome and state.outcome.exception(), types)
    predicate = when
    return lambda state: (
        state.outcome is not None and isinstance(error := state.outcome.exception(), Exception) and predicate(error)
    )


AWS_CONFLICT = RetryPolicy(
    "A change of a Lambda function", "another change is in progress", 24, 0.25, 4.0, jitter="half"
)
AWS_REMOVAL = RetryPolicy("Removal of a Lambda version", "another change is in progress", 3, 2.0, 2.0)
AWS_ROLE = RetryPolicy("Creation of a Lambda function", "its new role is not known everywhere", 60, 1.0, 1.0)
AWS_TRIAL = RetryPolicy("Trial of a new Lambda version", "throttled", 20, 0.25, 1.0, jitter="half")
AWS_PERMISSION = RetryPolicy(
    "Trial of a new Lambda version whose secrets its role may read since this deployment",
    "access is denied: the permission is not known everywhere",
    10,
    1.0,
    8.0,
)
AWS_DEPLOYMENT = RetryPolicy(
    "Deployment of a Lambda function", "another deployment was published between", 10, 0.25, 8.0, jitter="full"
)
HTTP_LOST = RetryPolicy(
    "Call of a function by HTTP, to a host that honours `Idempotency-Key`",
    "the connection is lost; not accepted after that",
    4,
    0.1,
    0.4,
    jitter="full",
)
WORKER_START = RetryPolicy("Start of a local function worker that no call waits for", "any", 0, 1.0, 60.0)
PART_START = RetryPolicy(
    "Start of an engine, environment host or function host", "it ends or is not ready", 0, 0.5, 5.0
)
ENGINE_FIRST_START = RetryPolicy("First start of an engine", "it ends or is not ready", 3, 0.5, 5.0)
TRAINER_START = RetryPolicy("First start of the trainer", "it ends or is not ready", 3, 1.0, 2.0)
TRAINER_WORK = RetryPolicy(
    "Work of the trainer before training", "it died, hung or failed; it is restarted", 3, 0.0, 0.0
)
DRAINED_ENGINE = RetryPolicy(
    "Restart of engines that were drained for a failed change of the layout", "any, while no engine serves", 5, 0.5, 5.0
)
TEACHER = RetryPolicy(
    "Request to a teacher's endpoint (`training.loss.reference`)",
    "the connection is lost, or status 408, 429 or 5xx",
    6,
    1.0,
    16.0,
    jitter="half",
)
WEBHOOK = RetryPolicy(
    "Notice to a webhook (`budget.notify`)",
    "the connection is lost, or status 408, 429 or 5xx",
    4,
    1.0,
    8.0,
    jitter="half",
)
VLLM_KV = RetryPolicy(
    "Removal of a vLLM server's KV cache", "it holds KV that other engines were promised", 0, 0.25, 0.25
)
WEIGHT_DIRECTORY = RetryPolicy("Lock of a directory of weights", "another process pulls into it", 0, 0.05, 0.05)
OPENENV_SESSION = RetryPolicy(
    "Session with an OpenEnv server", "no server has a free session or answers", 0, 0.05, 2.0, jitter="half"
)
RAY_ACTOR = RetryPolicy("Restart of a Ray actor", "it dies at its start", 6, 0.25, 2.0)
RAY_CLIENT = RetryPolicy("Connection of the Ray client", "its server did not start", 4, 0.1, 1.0)
RAY_GANG = RetryPolicy("Reservation of a gang of Ray placement groups", "not all fit", 0, 1.0, 1.0, jitter="full")

POLICIES = tuple(value for value in globals().copy().values() if isinstance(value, RetryPolicy))
"""All policies, in the order of the docs."""


def table() -> str:
    """The table of the docs, in Markdown."""
    lines = ["| operation | retried after | attempts | pauses | jitter | pauses in all |", "|---|---|---|---|---|---|"]
    for policy in POLICIES:
        attempts = str(policy.attempts or "until the caller's limit")
        constant = policy.first_s == policy.longest_s
        pauses = (
            f"{policy.first_s:g} s"
            if constant
            else f"{policy.first_s:g} s × {policy.factor:g}, up to {policy.longest_s:g} s"
        )
        total = f"{policy.total_s:.3g} s" if policy.attempts else "–"
        lines.append(f"| {policy.operation} | {policy.errors} | {attempts} | {pauses} | {policy.jitter} | {total} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
