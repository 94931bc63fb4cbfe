"""Kinds of events that components emit and reports read."""

from __future__ import annotations

UTC_CLOCK = "utc_clock"
"""Event at the start of each life of a run: `unix_s`, the UTC time of this second of the run."""

BUDGET_ALARM = "budget_alarm"
"""Event of a budget, about the alarm (`policy.budget.BudgetAlarm`): `spent_usd`, `budget_usd`, and its `text`."""

NOTICE = "notice"
"""Event after the last attempt to send a notice to a webhook, about its topic: `sent`, the webhook's `host`, and `why`
it was not sent. No event has the URL: with it anybody can post."""

TURN = "turn"
"""Event of a trajectory at the end of a turn: its number, seconds of its generation (`generation_s`) and of its
environment's step after it (`environment_s`), `engine`, `version` and `tokens`. Of the trajectories that a run traces
(`telemetry.turns`)."""

STEP_FAILED = "step_failed"
"""Event of a training step whose failure ends the run: `step`, counted from 1, the `version` that it started from, the
error (`why`), and the ids of its `samples`, with blanks between them."""

ENGINE_DID = "engine_did"
"""Event of an engine: the increase of its counters in an interval."""

HANDOFFS = "handoffs"
"""Event at each publish: hand-offs since the previous event that were decoded, `failed`, or transferred no KV
(`empty`)."""

CONCURRENCY = "concurrency"
"""Event of a publish. `engines`, and the `least`, `median` and `most` of their limits; since the last such event:
`admitted` trajectories and how many of them `waited`, sessions `evicted`, requests `preempted`. `waiting` is the
current number."""

DOMAIN_SHARE = "domain_share"
"""Event of a run at each publish, one per domain: the share of all batches that the domain was due, and the share that
it got."""

CANCELLED_AGAINST_KEPT = "cancelled_against_kept"
"""Event of a run at each publish, one per `BiasFeature` of the report over the last trajectories of either kind."""

FILTERED_AGAINST_KEPT = "filtered_against_kept"
"""Event of a run at each publish: trajectories of filtered groups beside those of kept ones, one per figure."""

ENGINE_UPDATED = "engine_updated"
"""The event of an engine that loaded a version by itself, `skipped` versions after its previous one."""

PLAN_ADOPTED = "plan_adopted"
"""Event of an adopted plan; a resume starts with that plan. Fields in JSON: `engines`, a list of [id, pool, role, tp],
and `work`, the measured `DomainWork` by domain for which the plan was made."""

OFFLOAD_STAGE = "offload_stage"
"""Event: counters of one stage (`stage`) of a function's pipeline since the functions were opened; zeros are
omitted."""

FUNCTION_HEALTH = "function_health"
"""Event: `outcomes` of a function since it was opened, `model_faults`, `faults` of the platform and of each kind
(`fault.<kind>`)."""

FUNCTION_REFUSED = "function_refused"
"""Event: calls of a function that its `provider` refused or a limit of this side delayed, since the function was
opened, by the limit (`Throttle`, `RefusingLimit`). `beside` names the other runs of this machine that were active and
called the provider."""

WORKER_LEFT_PROCESSES = "worker_left_processes"
"""Event: the first call of a function after which `processes` of its own still ran: they and the worker were ended."""

FUNCTION_VERSION = "function_version"
"""Event of a function when it is opened: its `version`, a digest. Of a deployed function that the run names also the
`reference`, the `provider` it was drawn from, the provider's `number` of the version, and the `weights` at the draw, in
JSON by number."""

ENVIRONMENTS_MADE = "environments_made"
"""The event with a host's environment constructions for a domain so far (`EnvironmentCreation`)."""

PLACES = "environment_places"
"""The event with the waits for slots on hosts so far, by purpose (`policy.host_slots`)."""

EVALUATION_SAMPLED = "evaluation_sampled"
"""Several samples per held-out prompt at a temperature: avg@n and pass@k of a domain."""

MODEL_SHAPE = "model_shape"
"""The policy's `config.json`, as text, and the bytes per parameter and per element of the KV cache."""

POOL_PEAK = "pool_peak"
"""The datasheet's rates of one device of a pool: TFLOP/s for engines and for the trainer, and TB/s; None if unknown."""

NODES = ("node_joined", "node_leaving", "node_lost")

FOLLOWED = ("rebalanced", "rebalance_rejected", "rebalance_failed", "engine_drained", "engine_given_up")
"""Reactions of the plan to nodes."""

REPORTED = (
    *(
        "evaluation",
        EVALUATION_SAMPLED,
        OFFLOAD_STAGE,
        FUNCTION_HEALTH,
        FUNCTION_REFUSED,
        FUNCTION_VERSION,
        WORKER_LEFT_PROCESSES,
        CANCELLED_AGAINST_KEPT,
        FILTERED_AGAINST_KEPT,
        DOMAIN_SHARE,
    ),
    *(CONCURRENCY, HANDOFFS, ENGINE_UPDATED, "weights_received", "weights_not_received", ENVIRONMENTS_MADE, PLACES),
    *(ENGINE_DID, MODEL_SHAPE, POOL_PEAK, "engine_started", *NODES, *FOLLOWED),
)
"""Kinds of events of which reports read all fields."""
