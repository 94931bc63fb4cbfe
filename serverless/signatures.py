"""Detects the calling convention of a reward function from its parameters. Packed with every function.

Existing reward functions work unchanged. Each row is a convention that `@reward` accepts, its mark, and the arguments
that its parameters get from an item (`serverless.calling` makes them). *text* is the last assistant message;
*chat* are the messages from the first assistant message on, or those after `metadata["prompt"]` where that is a list;
*prompt* are the messages before *chat*, as text `metadata["prompt"]` where that is a string, else their contents in
lines; *label* is the named metadata, else `reference_answer`.

takes         known by                         given
item          one parameter                    the `Item` (`rollart.Sample`)
samples       one parameter called `samples`   list[Item]; gives a list of the results for one item
              or a list of Item
items         one called `items` or `event`    the list of wire dicts; gives the list of answers (Nova and Bedrock RFT)
event         `(event, context)`               the same, and Lambda's context
verl          `solution_str`                   data_source metadata's or "", solution_str *text*, ground_truth *label*,
                                               extra_info metadata's or all metadata. number | dict with "score"
verl_batch    `solution_strs`                  data_sources, solution_strs, ground_truths, extra_infos: lists of those
trl           `completions`, `prompts` or      by keyword: prompts *prompt*, completions *text* (list[str] each),
              `completion_ids`                 completion_ids metadata's, trainer_state None, and every column: the
                                               metadata by name, list per name; answer, ground_truth, solution, label
                                               and target are *label*. list[float | None]; None (it does not apply
                                               here) counts 0.0, as TRL's sum does, with the metric not_applicable=1
trl_chat      the same, and its body reads     prompts and completions are lists of messages *prompt*, *chat*
              "content"
slime         `async (args, sample)`           args: a namespace without options; sample: prompt *prompt*, response
                                               *text*, label *label*, tokens, response_length, metadata, index, status.
                                               number | dict ("score" or "reward")
slime_batch   `async (args, samples)`          list of such samples; a list of those results
openrlhf      `(queries, prompts, labels)`     queries metadata's "query" or *prompt* + *text*, prompts *prompt*,
                                               labels *label*. tensor | list | dict with "rewards" (or "scores") and
                                               "extra_logs", whose per-item values become metrics
areal         `prompt_ids`, `completion_ids`,  the first four by position: *prompt*, *text*, prompt_ids and
              or `prompt` and `completions`    completion_ids metadata's or []; the metadata by name, `answer` is
                                               *label*. number
verifiers     `completion` or `state`, others  by name subset: prompt *prompt*, completion *chat* (messages), answer
              of its names only                *label* or "", state (these in a dict, with turn and metadata's
                                               "state"), task metadata's or "default", info metadata's or all
                                               metadata, parser (the default one: the text itself). number
verifiers_text  `completion: str`              the same with completion *text* and prompt text (message_type
                                               "completion")

Sources: verl `workers/reward_manager` and docs/preparation/reward_function; TRL `GRPOTrainer._calculate_rewards`;
slime `rollout/rm_hub/__init__.py` (async_rm, batched_async_rm); OpenRLHF README, "Custom reward function";
AReaL `workflow/rlvr.py`, `reward/gsm8k.py`; verifiers 0.1-0.3 `Rubric.call_reward_func`; AWS "Nova RFT" guide.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "ACCEPTED",
    "OPTIONS",
    "Convention",
    "Parameter",
    "CallableSignature",
    "Unknown",
    "of_object",
    "of_source",
    "recognise",
]

OPTIONS = "__rollart_reward__"
"""The attribute in which `serverless.declare.reward` stores its options on the decorated object."""


class Convention(enum.StrEnum):
    """The calling convention of a function. See the table above."""

    ITEM = "item"
    SAMPLES = "samples"
    ITEMS = "items"
    EVENT = "event"
    VERL = "verl"
    VERL_BATCH = "verl_batch"
    TRL = "trl"
    TRL_CHAT = "trl_chat"
    SLIME = "slime"
    SLIME_BATCH = "slime_batch"
    OPENRLHF = "openrlhf"
    AREAL = "areal"
    VERIFIERS = "verifiers"
    VERIFIERS_TEXT = "verifiers_text"


ACCEPTED = (
    "f(sample) with one Item",
    "f(samples: list[Item])",
    "f(items) or lambda_handler(event, context) with the list form (Nova, Bedrock)",
    "verl compute_score(data_source, solution_str, ground_truth, extra_info=None)",
    "TRL reward_func(prompts, completions, **columns)",
    "slime async custom_rm(args, sample, **kwargs)",
    "OpenRLHF reward_func(queries, prompts, labels)",
    "AReaL reward_fn(prompt, completions, prompt_ids, completion_ids, **data)",
    "verifiers func(completion, answer, prompt, state, task, info, parser) by any of these names",
)
"""The accepted signatures, listed in a refusal."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """`annotation` is its source text, '' for none."""

    name: str
    required: bool = True
    keyword_only: bool = False
    annotation: str = ""


@dataclass(frozen=True, slots=True)
class CallableSignature:
    """The signature of a callable. `reads_content`: its body contains the key "content"."""

    parameters: tuple[Parameter, ...]
    any_keyword: bool = False
    reads_content: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(p.name for p in self.parameters)

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if p.required)

    def without(self, names: Collection[str]) -> CallableSignature:
        """The signature where parameters of some names are given already."""
        return replace(self, parameters=tuple(p for p in self.parameters if p.name not in names))

    def __str__(self) -> str:
        return f"({', '.join([p.name for p in self.parameters] + ['**'] * self.any_keyword)})"


@dataclass(frozen=True, slots=True)
class Unknown:
    """No convention fits; `reason` explains why the nearest one does not."""

    reason: str


_VERL = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
_VERL_BATCH = frozenset({"data_sources", "solution_strs", "ground_truths", "extra_infos"})
_OPENRLHF = frozenset({"queries", "prompts", "labels"})
_VERIFIERS = frozenset({"prompt", "completion", "answer", "state", "task", "info", "parser"})
_LISTS = frozenset({"items", "event", "events"})
_CONTEXTS = frozenset({"context", "ctx", "_context", "_ctx", "_"})
_LIST_OF_ITEMS = re.compile(r"^(?:typing\.)?(?:list|List|Sequence|Iterable|tuple|Tuple)\[.*\b(?:Item|Sample)\b")


def recognise(shape: CallableSignature) -> Convention | Unknown:
    """The convention of a callable: the first that fits, in the order slime, verl, OpenRLHF, AReaL, TRL, verifiers,
    Lambda, one parameter. A function fits two of them only with a superset of names."""
    names = shape.names
    first_two = tuple(p.name for p in shape.parameters if not p.keyword_only)[:2]
    if first_two in (("args", "sample"), ("args", "samples")):
        known = frozenset(first_two)
        return _closed(shape, known, Convention.SLIME if first_two[1] == "sample" else Convention.SLIME_BATCH)
    if "solution_str" in names:
        return _closed(shape, _VERL, Convention.VERL)
    if "solution_strs" in names:
        return _closed(shape, _VERL_BATCH, Convention.VERL_BATCH)
    if "queries" in names:
        return _closed(shape, _OPENRLHF, Convention.OPENRLHF)
    if "prompts" not in names and ({"prompt_ids", "completion_ids"} <= names or {"prompt", "completions"} <= names):
        return Convention.AREAL
    if names & {"states", "infos"}:
        return Unknown("it scores a whole group (verifiers), whose items a function may get in different calls")
    if names & {"completions", "prompts", "completion_ids"}:
        return Convention.TRL_CHAT if shape.reads_content else Convention.TRL
    if names & {"completion", "state"}:
        completion = next((p for p in shape.parameters if p.name == "completion"), None)
        is_text = completion is not None and completion.annotation.strip("'\"") == "str"
        return _closed(shape, _VERIFIERS, Convention.VERIFIERS_TEXT if is_text else Convention.VERIFIERS)
    return _plain(shape)


def _closed(shape: CallableSignature, known: frozenset[str], convention: Convention) -> Convention | Unknown:
    """`convention`, if it supplies every required parameter."""
    missing = [name for name in shape.required if name not in known]
    if not missing:
        return convention
    return Unknown(f"it looks like {convention}, which gives no {', '.join(map(repr, missing))}")


def _plain(shape: CallableSignature) -> Convention | Unknown:
    positional = [p for p in shape.parameters if not p.keyword_only]
    if any(p.required and p.keyword_only for p in shape.parameters):
        return Unknown("it needs keyword arguments that no convention gives")
    needed = [p for p in positional if p.required] or positional[:1]
    if len(needed) == 2 and (needed[1].name in _CONTEXTS or needed[0].name in _LISTS):
        return Convention.EVENT
    if len(needed) != 1:
        return Unknown(f"it needs {len(needed)} arguments, of no known names")
    one = needed[0]
    annotation = one.annotation.strip("'\"")
    if one.name == "samples" or _LIST_OF_ITEMS.match(annotation):
        return Convention.SAMPLES
    if one.name in _LISTS:
        return Convention.ITEMS
    if annotation in ("str", "float", "int"):
        return Unknown(f"it takes a {annotation}, not an Item")
    return Convention.ITEM


def of_object(target: Any) -> CallableSignature:
    """The signature of a function, or of the `__call__` of a class or an object."""
    call = functools.partial(target.__call__, None) if inspect.isclass(target) else target
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return CallableSignature((), any_keyword=True)
    described = tuple(
        Parameter(
            p.name,
            p.default is p.empty,
            p.kind is p.KEYWORD_ONLY,
            "" if p.annotation is p.empty else _annotation(p.annotation),
        )
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return CallableSignature(described, any_keyword, _names_content(target))


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "") or str(annotation)


def _names_content(target: Any) -> bool:
    """True if the compiled body contains "content": the source may be unavailable."""
    function = inspect.unwrap(target.__call__ if inspect.isclass(target) or not _is_function(target) else target)
    pending = [getattr(function, "__code__", None)]
    while pending:
        code = pending.pop()
        constants = getattr(code, "co_consts", ())
        if "content" in constants:
            return True
        pending += [c for c in constants if hasattr(c, "co_consts")]
    return False


def _is_function(target: Any) -> bool:
    return inspect.isfunction(target) or inspect.ismethod(target)


def of_source(body: Sequence[ast.stmt], attribute: str) -> CallableSignature | None:
    """The same from a module's statements, without running them; None if the attribute is not a plain definition."""
    node = definition(body, attribute)
    if isinstance(node, ast.ClassDef):
        call = definition(node.body, "__call__")
        return _of_node(call, bound=1) if isinstance(call, ast.FunctionDef | ast.AsyncFunctionDef) else None
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return _of_node(node)
    return None


def definition(body: Sequence[ast.stmt], attribute: str) -> ast.AST | None:
    """The node that a name is bound to at the end of a module: a def, a class or a lambda, with aliases followed."""
    found: ast.AST | None = None
    for statement in _flat(body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if statement.name == attribute:
                found = statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(t, ast.Name) and t.id == attribute for t in targets):
                found = _value(body, statement.value, attribute)
    return found


def _value(body: Sequence[ast.stmt], value: ast.expr, attribute: str) -> ast.AST | None:
    if isinstance(value, ast.Lambda):
        return value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        made = definition(body, value.func.id) if value.func.id != attribute else None
        if isinstance(made, ast.FunctionDef):
            return _returned(made)
        return made if isinstance(made, ast.ClassDef) else None
    if isinstance(value, ast.Name) and value.id != attribute:
        return definition(body, value.id)
    return None


def _returned(factory: ast.FunctionDef) -> ast.AST | None:
    """The inner function that a factory returns."""
    for statement in reversed(factory.body):
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Name):
            return definition(factory.body, statement.value.id)
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Lambda):
            return statement.value
    return None


def _flat(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Statements, with the bodies of `if` and `try` inlined."""
    out: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If):
            out += _flat(statement.body) + _flat(statement.orelse)
        elif isinstance(statement, ast.Try):
            parts = [statement.body, *(h.body for h in statement.handlers), statement.orelse, statement.finalbody]
            out += [inner for part in parts for inner in _flat(part)]
        else:
            out.append(statement)
    return out


def _of_node(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, bound: int = 0) -> CallableSignature:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    described = [
        Parameter(p.arg, index < first_default, annotation=_text(p.annotation)) for index, p in enumerate(positional)
    ][bound:]
    described += [
        Parameter(p.arg, default is None, keyword_only=True, annotation=_text(p.annotation))
        for p, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    reads = any(isinstance(n, ast.Constant) and n.value == "content" for n in ast.walk(node))
    return CallableSignature(tuple(described), arguments.kwarg is not None, reads)


def _text(annotation: ast.expr | None) -> str:
    return ast.unparse(annotation) if annotation is not None else ""
