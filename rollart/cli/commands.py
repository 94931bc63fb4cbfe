"""The command line: every command with its arguments, options and help.

Nothing heavy is imported here: the function of a command is imported from its module when the command is invoked.
"""

from __future__ import annotations

import functools
import pkgutil
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from rollart.errors import UsageError

Declared = TypeVar("Declared", bound=Callable[..., Any])

WHAT_IF = "--what-if"

SEEDS, STEPS = 1, 10
"""Simulations, and training steps of each: enough to fill the pipeline and for a mean; a run has hundreds."""

TARGETS = ("kuberay", "ray", "cfn", "sam", "modal", "terraform", "knative")
"""Kinds of deployments that `rollart infra render` writes."""

OUTCOMES = (
    *("trained", "waiting", "stale", "filtered", "redundant", "fault", "eval", "dropped", "deferred", "refused"),
    "shutdown",
)
"""Outcomes of trajectories."""

COMPLETE = "_ROLLART_COMPLETE"
"""The variable by which a shell's completion asks."""

EPILOG = (
    "Exit codes: 0 ok, 1 run failed, 2 usage or spec, 3 provider, 4 budget, 5 fault rate, 6 stopped early, "
    "130 interrupted."
)


PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
DIRECTORY = click.Path(path_type=Path, file_okay=False)
COUNT = click.IntRange(1)

shown_option = functools.partial(click.option, show_default=True)
"""An option whose help shows its default."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=EPILOG)
@click.version_option(package_name="rollart", message="%(version)s")
def cli() -> None:
    """Train agents with reinforcement learning over mixed hardware, and see where every second and dollar went."""


def command(
    group: click.Group, target: str, cls: type[click.Command] = click.Command
) -> Callable[[Callable[[], None]], click.Command]:
    """Declare the command of `group` that the function `target` ("module:function" of this package) implements: the
    decorated function has its help and options, which are the implementation's parameters.

    `-o json` has the short form `--json`. UsageError where they disagree."""

    def declare(declared: Callable[[], None]) -> click.Command:
        @functools.wraps(declared)
        def invoke(**parameters: Any) -> None:
            if "output" in parameters and parameters.pop("as_json", False):
                given = click.get_current_context().get_parameter_source("output")
                if given is not ParameterSource.DEFAULT and parameters["output"] != "json":
                    raise UsageError(f"--json and -o {parameters['output']} (rule: one of them)", remedy="drop one")
                parameters["output"] = "json"
            pkgutil.resolve_name(f"rollart.cli.{target}")(**parameters)

        invoke.__dict__["target"] = target
        name = target.partition(":")[2].rstrip("_").replace("_", "-")
        return group.command(name, cls=cls)(invoke)

    return declare


def several(*options: Callable[[Declared], Declared]) -> Callable[[Declared], Declared]:
    """Arguments and options that belong together, in the order of the help."""
    return lambda declared: functools.reduce(lambda known, option: option(known), reversed(options), declared)


def completed_by(names: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Completion of an argument or option by a function of `rollart.cli.completion`."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return list(pkgutil.resolve_name(f"rollart.cli.completion:{names}")(context, incomplete))

    return complete


json_option = several(
    shown_option(
        "-o", "--output", type=click.Choice(["text", "json"]), default="text", help="For people, or for machines."
    ),
    click.option("--json", "as_json", is_flag=True, help="Short for -o json."),
)

FORMATS = ("table", "json", "csv", "html")


def formats_option(*more: str) -> Callable[[Declared], Declared]:
    """`-o` with the formats of every report, and `more` of one."""
    return several(
        shown_option(
            "-o",
            "--output",
            type=click.Choice([*FORMATS, *more]),
            default="table",
            help="For people, or for machines.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Short for -o json."),
    )


output_option = formats_option()

runs_option = shown_option("--runs-dir", type=PATH, default=Path("runs"), help="Directory that holds the runs.")

run_argument = click.argument("run", required=False, shell_complete=completed_by("runs"))

file_argument = click.argument("source", metavar="FILE", shell_complete=completed_by("files"))

function_argument = click.argument("function", shell_complete=completed_by("functions"))

report_options = several(run_argument, output_option, runs_option)


def exported_options(form: str, into: str) -> Callable[[Declared], Declared]:
    """Options of a report that other tools read in the format `form`; `into`: the help of `--into`."""
    return several(
        run_argument,
        formats_option(form),
        click.option("--into", type=FILE, metavar="FILE", help=into),
        runs_option,
    )


spec_arguments = several(
    click.argument("arguments", nargs=-1, metavar="[RUN.yaml] [KEY=VALUE]...", shell_complete=completed_by("specs")),
    click.option("--cluster", type=PATH, help="Cluster spec. Default: this machine."),
)

listen_option = shown_option(
    "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="Where to listen; port 0: any that is free."
)

provider_options = several(
    shown_option(
        "--provider",
        default="local",
        metavar="[local|aws|modal]",
        help="Where functions are.",
        shell_complete=completed_by("providers"),
    ),
    click.option("--cluster", type=PATH, help="Cluster spec with the provider's settings."),
    shown_option(
        "--root",
        type=PATH,
        default=Path(".rollart/functions"),
        help="Directory of locally deployed functions; RUN/functions has the logs of a run's.",
    ),
)

canary_option = click.option(
    "--canary",
    type=click.FloatRange(0.0, 1.0, min_open=True, max_open=True),
    metavar="SHARE",
    help="Share of the calls that the new version gets, as 0.1; the current version keeps the rest.",
)

prices_option = click.option("--cluster", type=PATH, help="Cluster spec; the shipped price list without it.")

writing_options = several(
    shown_option(
        "--into",
        type=PATH,
        default=Path("prices.yaml"),
        help="Price file to write: added to if it is there, else started from the cluster's list.",
    ),
    click.option("--region", default="", help="AWS region whose prices are taken."),
)


def token_option(secret: str) -> Callable[[Declared], Declared]:
    """`--token-env`, whose variable holds `secret`."""
    return click.option("--token-env", metavar="VAR", help=f"Variable with the {secret} that every call then needs.")


class PlanCommand(click.Command):
    """A command whose `--what-if` takes all changes that follow it: `--what-if h20=+32 price.h800=4.10`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread_changes(args))


def spread_changes(arguments: Sequence[str]) -> list[str]:
    """Give every change its own `--what-if`; the changes end at an option or an argument that is not key=value.
    UsageError for `--what-if` without a change."""
    spread: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument != WHAT_IF and not argument.startswith(f"{WHAT_IF}="):
            spread.append(argument)
            continue
        changes = argument.removeprefix(WHAT_IF).removeprefix("=").split()
        while rest and "=" in rest[0] and not rest[0].startswith("-"):
            changes += rest.popleft().split()
        if not changes:
            raise UsageError(
                "--what-if names no change", remedy="write it like h20=+32, price.h800=4.10 or in_flight=512"
            )
        for change in changes:
            spread += [WHAT_IF, change]
    return spread


@command(cli, "launch:launch")
@spec_arguments
@click.option("--dry-run", is_flag=True, help="Print what would run, as YAML, and stop.")
@click.option("--resume", metavar="RUN", help="Continue a run from its last published version.")
@click.option(
    "--from",
    "source",
    metavar="RUN[@best|@latest|@vN]",
    help="Start from a version of another run, with this run's own spec, in place of a warm start.",
)
@click.option("--optimizer", is_flag=True, help="With --from: also take over the optimizer's state.")
@click.option("--name", help="Name of the run's directory. Default: the run's name and a number.")
@click.option("--detach", is_flag=True, help="Run in the background: see `rollart status`, `logs` and `stop`.")
@runs_option
def launch() -> None:
    """Start a run; without RUN.yaml the built-in quickstart.

    KEY=VALUE sets any key of the run (batch.trajectories=64, domains.lake.max_turns=5), or of the cluster with the
    prefix `cluster.`.
    """


@command(cli, "plan:plan", cls=PlanCommand)
@spec_arguments
@click.option(
    WHAT_IF,
    "changes",
    multiple=True,
    metavar="CHANGE...",
    help="Show the plan before and after changes: h20=+32 price.h800=4.10 link.h800-h20=25 model=DIR in_flight=512.",
)
@click.option("--fast", is_flag=True, help="Leave out the parts that need further solutions of the problem.")
@click.option("--play", is_flag=True, help="Play the environments to learn the work of domains without a profile.")
@click.option("--simulate", is_flag=True, help="Also simulate the plan, and show its figures beside the plan's.")
@click.option("--seeds", type=click.IntRange(1, 1000), help=f"Simulations of --simulate. Default: {SEEDS}.")
@click.option("--steps", type=COUNT, help=f"Training steps of each. Default: {STEPS}.")
@output_option
def plan() -> None:
    """Show the placement of the run's parts, its rate and cost, and the reasons.

    Also the bottleneck, the value of one more device, and the rates of simpler plans. Without engine counts in the
    cluster spec the plan is computed; with them, its rate is predicted where possible.
    """


@command(cli, "simulate:simulate")
@click.argument("arguments", nargs=-1, metavar="[RUN.yaml|RUN] [KEY=VALUE]...")
@click.option("--cluster", type=PATH, help="Cluster spec. Default: this machine, or a recorded run's own.")
@click.option("--policies", metavar="A,B,...", help="Schedules beside each other. Default: the run's own.")
@shown_option("--seeds", type=click.IntRange(1, 1000), default=1, help="Simulations of each.")
@click.option(
    "--steps", type=COUNT, help=f"Training steps, like steps=N. Default: {STEPS}, or as many as a recorded run has."
)
@click.option("--workers", type=COUNT, help="Processes at a time. Default: one per core.")
@click.option("--fuzz", type=click.IntRange(0), metavar="SEED", help="Shuffle events of the same instant.")
@click.option("--keep", type=PATH, metavar="DIR", help="Keep ledgers there, for rollart report.")
@click.option("--html", type=PATH, metavar="FILE", help="Also write a page with charts there.")
@click.option("--faults", type=PATH, help="Fault plan (`rollart schema faults`).")
@click.option("--replay", metavar="RUN", help="Repeat the trajectories and rewards of a recorded run.")
@click.option("--resample", is_flag=True, help="Draw recorded trajectories instead of repeating them in their order.")
@click.option("--check", is_flag=True, help="Simulate a recorded run as it was: predicted against recorded.")
@runs_option
@output_option
def simulate() -> None:
    """Simulate a run on virtual time, at any scale, with the product's own scheduler.

    Engines, environments, training and links are modelled from the plan; all scheduling code is the product's. Same
    spec and seed, same trace. Shows step time and its parts, cost, staleness, waste and waits; as html also charts and,
    for the first seed of each schedule, a timeline of busy devices.

    Of a recorded run (its name or directory) the trajectories, rewards and environment times are repeated: as it was,
    or with other keys, policies, prices or another cluster.
    """


@command(cli, "compare.advise:advise")
@click.argument("arguments", nargs=-1, metavar="[RUN|RUN.yaml] [KEY=VALUE]...")
@click.option("--cluster", type=PATH, help="Cluster spec of RUN.yaml. Default: this machine, or a run's own.")
@click.option("--fast", is_flag=True, help="Show alarms and exposed seconds alone; simulate nothing.")
@shown_option("--seeds", type=click.IntRange(2, 1000), default=5, help="Simulations of each change.")
@click.option("--steps", type=COUNT, help="Training steps of each. Default: 20, or as many as the run has.")
@click.option("--workers", type=COUNT, help="Processes at a time. Default: one per core.")
@runs_option
@output_option
def advise() -> None:
    """Show a run's alarms, the seconds that each part costs, and at most three changes that help.

    Each change is simulated on this very run (the trajectories, rewards and times of its ledger) beside the unchanged
    run, over the same seeds: seconds and dollars saved, with intervals. No change is advised that saves less than its
    interval. RUN is a name or directory, without it the latest run; of RUN.yaml, the plan is simulated.
    """


@command(cli, "calibrate:calibrate")
@spec_arguments
@shown_option(
    "-o",
    "--output",
    "out",
    type=PATH,
    default=Path("calibration.json"),
    help="File to write; name it in the cluster spec's `calibration`.",
)
@click.option("--from", "measured", metavar="RUN", help="Fit the counters of this run's engines; start nothing.")
@runs_option
def calibrate() -> None:
    """Measure this machine with a run's model, and write the constants that plans need.

    Probes the engine and the trainer alone, then starts the run three times for a few steps, with different mixes of
    its domains. Takes a few minutes; other load on the machine distorts the measurement.

    With --from, the constants of devices are fitted from the engines of an earlier run (vLLM's on GPUs as well), and
    those of training from the steps of its trainer on GPUs.
    """


@cli.group("rewards")
def rewards() -> None:
    """Write, test, deploy and operate reward functions.

    FILE is a Python file with functions under @rollart.reward, or FILE.py:NAME for one of them. Exit codes: 2 for
    errors in the function or the command, 3 for the provider or its credentials, 1 where a case or a call failed.
    """


@command(rewards, "rewards.develop:init")
@click.argument("directory", type=PATH, default=Path("reward"))
@click.option("--name", default=None, help="Name of the reward; the directory's if not given.")
@json_option
def rewards_init() -> None:
    """Write a reward that works, with cases that it passes, into DIRECTORY."""


@command(rewards, "rewards.develop:test")
@file_argument
@click.option("--cases", type=PATH, help="Items, one JSON object a line; cases.jsonl if not given.")
@click.option("--allow-unsafe", is_flag=True, help="Run an untrusted reward without a sandbox.")
@output_option
def rewards_test() -> None:
    """Run rewards on cases, as a provider would: scores, time, memory, dollars per million items."""


@command(rewards, "rewards.dev:dev")
@file_argument
@click.option("--cases", type=PATH, help="Items, one JSON object a line; cases.jsonl if not given.")
@click.option("--port", type=click.IntRange(0, 65535), help="Also serve the rewards over HTTP there; 0: any free port.")
@click.option("--allow-unsafe", is_flag=True, help="Run an untrusted reward without a sandbox.")
@output_option
def rewards_dev() -> None:
    """Run rewards on cases at each save of FILE, of the files packed with it or of the cases, until Ctrl-C.

    Shows the cases whose result changed, times, memory, dollars per million items on each provider, and warnings.
    Workers stay warm. With -o json every save is an object on a line.
    """


@command(rewards, "rewards.develop:doctor")
@file_argument
@click.option("--cases", type=PATH, help="Items, one JSON object a line; cases.jsonl if not given. Four are used.")
@click.option("--cluster", type=PATH, help="Cluster spec whose `functions.pipeline` is used.")
@shown_option(
    "--provider",
    default="aws",
    metavar="[local|aws|modal]",
    help="Provider whose prices are used.",
    shell_complete=completed_by("providers"),
)
@click.option("--allow-unsafe", is_flag=True, help="Run an untrusted reward without a sandbox.")
@output_option
def rewards_doctor() -> None:
    """Inject faults into rewards as a run calls them, and show what the run would see of each.

    Quota and rate limits, lost, late, empty and malformed answers, crashes, exhausted memory; and inside the reward,
    refused connections and refused memory. Local workers, with short time limits and pauses. Exit code 1 if a fault
    became a number in place of a masked sample.
    """


@command(rewards, "rewards.release:diff")
@file_argument
@provider_options
@click.option("--name", default=None, help="Another name for a single reward.")
@canary_option
@click.option("--cases", type=PATH, help="Items to measure the cost with; cases.jsonl if not given.")
@shown_option("--cost/--no-cost", default=True, help="Run both versions on the cases here, and compare their cost.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if there are changes, as `git diff --exit-code`.")
@output_option
def rewards_diff() -> None:
    """Compare the rewards of FILE with the deployed versions: source, requirements, settings, role and cost.

    Nothing is deployed. `deploy --dry-run` lists the same changes without the text of the source.
    """


@command(rewards, "rewards.release:deploy")
@file_argument
@provider_options
@click.option("--dry-run", is_flag=True, help="Show the changes without making them.")
@click.option("--name", default=None, help="Another name for a single reward.")
@click.option("--render", type=PATH, help="Write the build contexts of Lambda images there; deploy nothing.")
@canary_option
@output_option
def rewards_deploy() -> None:
    """Deploy rewards to a provider. Deploying an existing version changes nothing.

    With --canary the current version stays current, and the new one gets a share of its calls, until `promote`,
    `rollback` or another deployment.
    """


@command(rewards, "rewards.release:promote")
@function_argument
@provider_options
@shown_option("--runs", type=PATH, default=Path("runs"), help="Directory of recorded runs to compare the versions by.")
@click.option("--cases", type=PATH, help="Compare them by items that both are called with now.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Promote it although it has more faults.")
@output_option
def rewards_promote() -> None:
    """Make the canary of a function its only current version.

    First both versions are compared: scores, faults, median latency, and cost per million items. A canary whose share
    of faults is larger, beyond the 95 % interval, is refused with exit code 5.
    """


@command(rewards, "rewards.operate:list_")
@provider_options
@output_option
def rewards_list() -> None:
    """Deployed functions: their current versions, and their canaries with the share of calls of each."""


@command(rewards, "rewards.operate:versions")
@function_argument
@provider_options
@output_option
def rewards_versions() -> None:
    """Versions of a function, newest first."""


@command(rewards, "rewards.operate:invoke")
@click.argument("source", metavar="FILE|NAME", shell_complete=completed_by("functions_or_files"))
@click.option("--item", default=None, help="One item as JSON; standard input if not given.")
@provider_options
@shown_option(
    "--timeout", "seconds", type=click.FloatRange(min=0.001), default=60.0, help="Seconds to wait, cold start included."
)
@json_option
def rewards_invoke() -> None:
    """Call a reward on a provider with an item, or a list of them, and print its answer as JSON.

    NAME calls a deployed function: the current version or its canary, by their weights. NAME@VERSION calls one version,
    by its number, the start of its digest, or an alias (live, canary; on Lambda also a run's). FILE calls the version
    of the file, which is deployed first if it is not there; the current version stays current. With --json the bill is
    printed with the answer.
    """


@command(rewards, "rewards.operate:logs")
@function_argument
@provider_options
@shown_option("--since", "since_s", type=click.FloatRange(min=0), default=3600.0, help="Seconds ago.")
@shown_option("--limit", type=COUNT, default=1000, help="Most lines.")
@click.option(
    "--run",
    default="",
    metavar="RUN",
    help="Only lines of calls of this run: its id, or how it starts.",
    shell_complete=completed_by("runs"),
)
@click.option("--trajectory", default="", metavar="ID", help="Only lines of calls that scored this trajectory.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@output_option
def rewards_logs() -> None:
    """Show the output of a function, oldest first, with the run and the trajectory that each line belongs to.

    A reward that scores several items in one call shows the trajectories of the call. Output of child processes belongs
    to none.
    """


@command(rewards, "rewards.operate:scale")
@function_argument
@provider_options
@click.option("--warm", type=click.IntRange(min=0), default=None, help="Workers that are kept ready.")
@click.option("--concurrency", type=COUNT, default=None, help="Most workers at once.")
@output_option
def rewards_scale() -> None:
    """Set the number of warm workers of a function, and its concurrency."""


@command(rewards, "rewards.release:rollback")
@function_argument
@click.option(
    "--to",
    "version",
    default="",
    help="Version: its number, or how its digest starts.",
    shell_complete=completed_by("versions"),
)
@provider_options
@output_option
def rewards_rollback() -> None:
    """End the canary of a function; without one, make the version before the current one current."""


@command(rewards, "rewards.operate:delete")
@function_argument
@provider_options
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def rewards_delete() -> None:
    """Remove a function with all its versions from a provider."""


@command(rewards, "rewards.develop:plan")
@file_argument
@click.option("--cases", type=PATH, help="Items to measure with; cases.jsonl if not given.")
@click.option("--items", type=COUNT, required=True, help="Items that a run scores.")
@shown_option("--runs-per-month", type=click.FloatRange(min=0), default=1.0)
@click.option(
    "--from",
    "before",
    default=None,
    metavar="PROVIDER",
    help="Provider that they are on now.",
    shell_complete=completed_by("providers"),
)
@output_option
def rewards_plan() -> None:
    """Show the cost of rewards per run and month on each provider, compared with their current one."""


@command(rewards, "rewards.rescore:rescore")
@click.argument("run", metavar="RUN", shell_complete=completed_by("runs"))
@click.option(
    "--with",
    "source",
    required=True,
    metavar="FILE|NAME[@VERSION]",
    help="Reward that scores the run's kept items again: of a file, or deployed.",
    shell_complete=completed_by("functions_or_files"),
)
@shown_option("--times", type=click.IntRange(1, 1000), default=1, help="Answers per item, for the variance of a judge.")
@click.option("--function", metavar="NAME", help="Function of the run to compare with; needed where it has several.")
@click.option("--sample", type=COUNT, metavar="N", help="Most items, drawn by whole prompts.")
@shown_option(
    "--tolerance", type=click.FloatRange(min=0), default=0.05, help="Largest difference of scores that agree."
)
@click.option("--threshold", type=float, help="Least score that passes. Default: the middle of scores of two values.")
@shown_option(
    "--provider",
    default="local",
    metavar="[local|aws|modal]",
    help="Where the reward runs.",
    shell_complete=completed_by("providers"),
)
@click.option("--cluster", type=PATH, help="Cluster spec with the provider's settings. Default: the run's own.")
@shown_option("--root", type=PATH, default=Path(".rollart/functions"), help="Directory of locally deployed functions.")
@click.option("--allow-unsafe", is_flag=True, help="Run an untrusted reward without a sandbox.")
@runs_option
@output_option
def rewards_rescore() -> None:
    """Score the rollouts of RUN with another reward, and compare: agreement, drift, effect on groups, cost.

    Needs kept items (`keep` of the run spec; by default all). The run may have been interrupted.
    """


@command(rewards, "servers:serve")
@click.argument("source", metavar="FILE", shell_complete=completed_by("functions_or_files"))
@shown_option("--host", default="127.0.0.1", help="Address to listen on.")
@shown_option("--port", type=click.IntRange(0, 65535), default=0, help="0: any that is free.")
@click.option("--token-env", metavar="VAR", help="Variable with the bearer token that every call then needs.")
@provider_options
@click.option("--allow-unsafe", is_flag=True, help="Run untrusted rewards without a sandbox.")
@json_option
def rewards_serve() -> None:
    """Serve the rewards of FILE, or of a package (NAME-VERSION.zip), over HTTP until Ctrl-C, in workers on demand.

    In place of FILE, NAME[@VERSION] is a function deployed to --provider: each call goes to the current version or its
    canary, by their weights; a promotion or rollback takes effect within 5 s.

    A run with the provider `http` can call them, and so can clients of AWS Lambda's API (Invoke). GET /health answers
    200 while it serves.
    """


@command(cli, "servers:proxy")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    required=True,
    metavar="URL",
    help="Engine to generate with; may be given again.",
)
@click.option(
    "--tokenizer",
    required=True,
    type=DIRECTORY,
    help="Hugging Face directory with tokenizer.json and, for chats, a chat template.",
)
@listen_option
@click.option("--chat-template", type=FILE, help="Jinja file to use instead of the tokenizer's own.")
@click.option(
    "--tool-parser",
    type=click.Choice(["hermes", "json", "none"]),
    help="Format of the model's tool calls; by default inferred from its template.",
)
@click.option("--record", type=FILE, help="File that gets every turn's segments, one JSON line each.")
@shown_option("--model-name", default="policy", help="Name of the policy in /v1/models. Requests may name any model.")
@click.option("--max-sessions", type=COUNT, metavar="N", help="Sessions kept. Default: 4096.")
@click.option("--max-tokens", type=COUNT, metavar="N", help="Tokens kept in all sessions. Default: 100000000.")
@click.option(
    "--idle-s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Sessions idle for this long may be evicted for others. Default: 3600.",
)
@token_option("API key")
@json_option
def proxy() -> None:
    """Serve OpenAI's and Anthropic's APIs in front of engines until Ctrl-C, and capture every token.

    Sessions are named by the path (base URL http://HOST:PORT/s/SESSION/v1) or the header X-Rollart-Session. GET
    /sessions/SESSION gives a session's trajectories: token ids, log-probabilities and policy versions as sampled.
    """


@command(cli, "servers:dashboard")
@run_argument
@shown_option("--host", default="127.0.0.1", help="Address to listen on; another than this machine's needs a token.")
@shown_option("--port", type=click.IntRange(0, 65535), default=0, help="0: any that is free.")
@click.option(
    "--token-env",
    metavar="VAR",
    help="Variable with the token that readers need; drawn if it is not given, but needed.",
)
@json_option
@shown_option(
    "--runs", "--runs-dir", "runs_dir", type=PATH, default=Path("runs"), help="Directory that holds the runs."
)
def dashboard() -> None:
    """Show runs in a browser until Ctrl-C, while they go on and after: read-only, without a network.

    Curves with intervals, costs with a forecast, utilization, a timeline from the whole run to a single turn,
    trajectories, engines, functions, environments, alarms, and runs side by side. RUN shows one run alone.
    """


@command(cli, "servers:service")
@listen_option
@token_option("bearer token")
@click.option(
    "--data",
    type=DIRECTORY,
    metavar="DIR",
    help="Directory that persists the service's data; without it, the data is lost when the service ends.",
)
@json_option
def service() -> None:
    """Serve a table of samples until Ctrl-C: prompts in, experience in and out by columns, weights announced.

    For external trainers, engines and rewards; `rollart.service` is the Python client.
    """


@cli.group("prices")
def prices() -> None:
    """Show prices, and renew them in a price file of your own.

    A cluster spec takes such a file by `prices: FILE`. The shipped list is never changed.
    """


@command(prices, "prices:list_")
@prices_option
@output_option
def prices_list() -> None:
    """Every price that a run would use, with its source and age."""


@command(prices, "prices:import_")
@click.argument("file", type=PATH)
@prices_option
@writing_options
@output_option
def prices_import() -> None:
    """Import prices from FILE into a price file, and show the changes.

    FILE is a price list in YAML, CSV or JSON (name, unit, usd, source, date), or an AWS offer file of one region
    (AWSLambda or AmazonEC2, as JSON).
    """


@command(prices, "prices:refresh")
@click.option(
    "--provider", "providers", multiple=True, metavar="[aws|modal]", help="Provider to ask; all if not given."
)
@prices_option
@writing_options
@output_option
def prices_refresh() -> None:
    """Ask providers for today's prices, and write them to a price file.

    AWS and Modal are asked with the credentials of the environment. Without any, exit code 3.
    """


@command(cli, "completion:completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion() -> None:
    """Print the script by which a shell completes commands, options, functions, versions, runs and domains.

    bash: eval "$(rollart completion bash)" in ~/.bashrc; zsh: the same with zsh in ~/.zshrc; fish: rollart completion
    fish > ~/.config/fish/completions/rollart.fish. Functions of a provider are those of its last `rewards list` or
    `versions`.
    """


@command(cli, "specs:validate")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def validate() -> None:
    """Check run, cluster, price and fault files.

    Every problem comes with its file, line and column. A run is checked as `rollart launch` checks it before it starts
    anything, on the cluster file beside it or on this machine: the model's files are read, the tokenizer is loaded, the
    reward functions are packed, each environment is made once where it would live, and the parts are placed. Checks
    that need other machines are listed and not made.
    """


@command(cli, "specs:schema")
@click.argument("kind", metavar="run|cluster|prices|faults|report.NAME")
def schema() -> None:
    """Print the JSON Schema of a spec, for editors, or of a report's JSON (report.cost)."""


@cli.group("report")
def report() -> None:
    """Show cost, utilization and learning of a run. RUN is a name or directory; without it the latest run."""


@command(report, "reports:cost")
@exported_options("focus", "File to write instead of printing; with -o focus as Parquet if it ends in .parquet.")
def report_cost() -> None:
    """Show dollars: in all and beside the plan, over time, by tag, role and resource, and waste by cause.

    focus: a row per resource, hour and charge in the FinOps Open Cost and Usage Specification 1.2, as CSV or Parquet.
    """


@command(report, "reports:fleet")
@shown_option("--runs-dir", "--runs", type=PATH, default=Path("runs"), help="Directory that holds the runs.")
@shown_option("--by", default="month", metavar="KEY,...", help="Tags of runs and pools, or fields of charges.")
@output_option
@click.option("--into", type=FILE, metavar="FILE", help="File to write instead of printing.")
def report_fleet() -> None:
    """Show the dollars of all runs below a directory, by tags and fields of their charges.

    Fields: run, cluster, month, day, service, provider, role, pool, sku, price. Tags are `tags` of the runs and of the
    pools of their clusters (`--by team,month`); months and days are those of UTC.
    """


@command(report, "reports:utilization")
@report_options
def report_utilization() -> None:
    """Show time: each resource's states, rates, and the domains' trajectories."""


@command(report, "reports:timeline")
@exported_options("perfetto", "File to write instead of printing.")
def report_timeline() -> None:
    """Show busy, waiting and syncing time over the run: devices by role and pool, trajectories, and function calls.

    perfetto: a trace of the whole run for ui.perfetto.dev or chrome://tracing, down to single trajectories and calls.
    """


@command(report, "reports:curve")
@report_options
@click.option("--png", type=PATH, help="Also draw the curves into this file.")
def report_curve() -> None:
    """Show success by policy version, per domain."""


@command(report, "reports:offload")
@report_options
@shown_option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=0.25,
    help="Seconds that the p99 of a call may wait for a dedicated worker.",
)
@click.option("--check", is_flag=True, help="Also simulate the run again with each function at 0 s, and compare.")
def report_offload() -> None:
    """Show seconds of the run that each function costs, and its calls on dedicated workers, inline, or scaled
    otherwise."""


@command(report, "reports:bias")
@report_options
def report_bias() -> None:
    """Show whether the trained trajectories are distributed as the drawn ones, and how the lost ones differ by reason:
    length, turns, difficulty and reward per domain, each with a two-sample test. Of a real run, or of a simulation kept
    by `simulate --keep`."""


@command(cli, "compare.diff:diff")
@click.argument("run_a", metavar="RUN_A", shell_complete=completed_by("runs"))
@click.argument("run_b", metavar="RUN_B", shell_complete=completed_by("runs"))
@output_option
@runs_option
def diff() -> None:
    """Show the difference of two runs: inputs, success, and the parts of their seconds and dollars.

    Inputs: specs, plan, prices, versions of functions and of rollart. Success is compared after as many trained
    samples, with intervals. The parts of seconds and dollars add up to the whole difference.
    """


@command(cli, "trajectories:trajectories")
@run_argument
@click.option("--domain", help="Only those of this domain.")
@click.option("--outcome", type=click.Choice(OUTCOMES), help="Only those with this outcome.")
@shown_option(
    "--sort", type=click.Choice(["end", "tokens", "reward", "usd"]), default="end", help="Order; the largest first."
)
@shown_option("-n", "--most", type=click.IntRange(0), default=20, help="How many; 0: all.")
@click.option("--export", type=FILE, metavar="FILE", help="Write the kept ones, with content, to a .jsonl or .parquet.")
@output_option
@runs_option
def trajectories() -> None:
    """List trajectories with their outcome, tokens, reward, seconds and dollars.

    RUN is a name or directory; without it the latest run. `--export` writes all that were kept (`keep` of the run
    spec), of the domain and outcome if they are given, in a form that viewers of rollouts read (docs/trajectories.md).
    """


@command(cli, "trajectories:trajectory")
@click.argument("id_", metavar="ID")
@click.option("--run", help="Name or directory of the run. Default: the latest.", shell_complete=completed_by("runs"))
@output_option
@runs_option
def trajectory() -> None:
    """Show one trajectory: messages, versions, log-probabilities, rewards, seconds and dollars.

    json and csv have every token, html is one page. The content is there if the run kept it (`keep` of the run spec).
    """


@command(cli, "trajectories:why")
@click.argument("id_", metavar="ID")
@click.option("--run", help="Name or directory of the run. Default: the latest.", shell_complete=completed_by("runs"))
@output_option
@runs_option
def why() -> None:
    """Show each decision about a trajectory, with the figure behind it.

    When and under which limit it was admitted, where its turns went and why, what scored it, and why it was trained or
    dropped.
    """


@command(cli, "trajectories:verify")
@report_options
def verify() -> None:
    """Audit a run's ledger; exit code 1 if a rule is broken, with every row that breaks one.

    Each prompt is trained, dropped with a reason or waiting, nothing is trained twice, versions follow each other, and
    no second or dollar is missing or counted twice, over all lives of the run.
    """


@command(cli, "replay.bundles:bundle")
@run_argument
@click.option("--step", type=COUNT, help="Step, from 1. Default: the one whose failure ended the run, else the last.")
@click.option("-o", "--out", type=FILE, required=True, metavar="FILE", help="File to write, a zip.")
@shown_option("--weights/--no-weights", default=True, help="With the weights and optimizer that the step started from.")
@runs_option
def bundle() -> None:
    """Write all that one training step was given into a file that `rollart replay` repeats on any machine.

    Its batch, trajectories, reward outcomes, the packages of its reward functions, specs, versions of libraries, and
    the weights that it started from; no variable and no secret of this machine. The run must have kept these weights
    (`checkpoints`) and the trajectories (`keep`); of a step whose failure ended the run both are there.
    """


@command(cli, "replay.bundles:replay")
@click.argument("source", metavar="BUNDLE", type=FILE)
@click.option("--rewards", metavar="FILE", help="Python file with rewards in place of those of the same names.")
@shown_option("--device", default="cpu", help="Device of the trainer, as torch names it.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0.0),
    help="Relative difference of advantages, loss and gradient norm. Default: none on the same processor, torch and "
    "transformers, else 1e-06.",
)
@click.option("--allow-unsafe", is_flag=True, help="Run untrusted rewards without a sandbox.")
@output_option
def replay() -> None:
    """Repeat a bundled step: call its deterministic reward functions again, train the batch, and compare.

    Exit code 1, with the first difference, unless rewards are bit-equal and advantages and loss agree. With `--rewards`
    the trajectories are paid by other functions, and the step is trained with what these pay. It runs the code in the
    bundle: replay those that you trust.
    """


@command(cli, "status:status")
@run_argument
@click.option("-w", "--watch", is_flag=True, help="Show it until the run ends, with its last minute.")
@output_option
@runs_option
def status() -> None:
    """Show the status of a run.

    Its process, version, step, trajectories and cost so far. RUN is a name or directory; without it the latest run.
    """


@command(cli, "runs:demo_data")
@runs_option
def demo_data() -> None:
    """Put a recorded run beside your own, to try every report on.

    It is a quickstart of 60 steps, recorded on two cores. What reads a run takes it by its name, demo-data.
    """


@command(cli, "runs:export")
@run_argument
@shown_option(
    "--version",
    default="latest",
    metavar="best|latest|vN",
    help="Which version; best: by success on held-out episodes.",
)
@click.option(
    "--adapter", metavar="NAME", help="The adapter to merge, of a run whose domains have adapters of their own."
)
@click.option("-o", "--output", "out", type=DIRECTORY, required=True, metavar="DIR", help="Directory to write.")
@click.option("--force", is_flag=True, help="Replace the files of an earlier export in DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print version, directory and files as JSON.")
@runs_option
def export() -> None:
    """Export a version of a run as a Hugging Face directory, with a model card.

    transformers and vLLM load it: configuration, weights, tokenizer with its chat template. The card names the base
    model, the training's settings, success on held-out episodes, hours and cost. RUN is a name or directory; without
    it the latest run.
    """


@command(cli, "runs:logs")
@run_argument
@click.option(
    "--role",
    help="Only parts of this role (engine, prefill, decode, trainer, environment, reward, launch) or this name.",
)
@shown_option("-n", "--lines", type=click.IntRange(0), default=20, help="Last lines of each part.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until the run ends.")
@runs_option
def logs() -> None:
    """Show the logs of a run's parts.

    RUN is a name or directory; without it the latest run.
    """


@command(cli, "runs:stop")
@run_argument
@runs_option
@shown_option("--wait", "wait_s", type=click.FloatRange(0), default=60.0, help="Seconds to wait.")
@click.option("--kill", is_flag=True, help="Kill it if it has not stopped by then; --resume still continues it.")
def stop() -> None:
    """Stop a run and wait until it has ended.

    It can be continued with `launch --resume`. RUN is a name or directory; without it the latest run. Works from any
    machine that sees the directory.
    """


@command(cli, "doctor:doctor")
@click.argument("arguments", nargs=-1, metavar="[RUN.yaml] [KEY=VALUE]...")
@click.option("--cluster", type=PATH, help="Cluster spec of RUN.yaml. Default: this machine.")
@output_option
@runs_option
def doctor() -> None:
    """Check this machine and the installed extras.

    Python, cores, memory, disk, ports. Fails only if a requirement of every run is missing or, given RUN.yaml, a
    requirement of that run.
    """


@cli.group("infra")
def infra() -> None:
    """Render the deployment files of a cluster from its spec."""


@command(infra, "specs:render")
@click.argument("arguments", nargs=-1, metavar="[RUN.yaml] [KEY=VALUE]...")
@click.option("--cluster", type=PATH, required=True, help="Cluster spec.")
@click.option("--target", type=click.Choice(TARGETS), required=True, help="Kind of deployment.")
@click.option(
    "-o",
    "--output",
    type=DIRECTORY,
    required=True,
    metavar="DIR",
    help="Where the files go; those of the same name are replaced.",
)
@click.option(
    "--image",
    multiple=True,
    metavar="[POOL=]IMAGE",
    help="Image of the pods or hosts, of one pool or function, or of `head`. Default: of infra/Dockerfile, "
    "rollart:VERSION, rollart-vllm:VERSION for vLLM, rollart-environments:VERSION for environments with an interpreter "
    "of their own.",
)
@click.option("--namespace", help="Kubernetes namespace. Default: default.")
def infra_render() -> None:
    """Write the files that deploy a cluster; nothing is deployed.

    kuberay: a RayCluster, with RUN.yaml also a RayJob. ray: a `ray start` per pool, and `ray up` where pools say their
    instance_type. cfn, sam, terraform: RUN.yaml's reward functions on AWS Lambda, a bucket, and their roles. modal: the
    functions as Modal apps. knative: the functions as Knative Services. Same specs, same bytes.
    """
