"""Text forms of OpenEnv's observations and actions, which are mappings. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollart.adapters.envs.lookup import attribute_at
from rollart.errors import EnvironmentFault

__all__ = ["ActionEncoder", "ObservationRenderer", "action_encoder", "observation_renderer", "sole_text_field"]

ObservationRenderer = Callable[[Mapping[str, Any]], str]

JSON = "json"
"""`action: json`: the policy writes the whole action."""


@dataclass(frozen=True, slots=True)
class ActionEncoder:
    """From the policy's text to an action; ValueError for a text that is not an action. `fields` are the names that the
    spec gave, None if the policy names the fields itself."""

    encode: Callable[[str], Mapping[str, Any]]
    fields: frozenset[str] | None = None

    def __call__(self, text: str) -> Mapping[str, Any]:
        action = self.encode(text)
        if not isinstance(action, Mapping):
            raise ValueError(f"an action is a mapping, not {type(action).__name__}")
        return action


def action_encoder(action: str | ActionEncoder | Callable[[str], Mapping[str, Any]] | None) -> ActionEncoder | None:
    """The encoder of actions; None if the server's schema must be read first."""
    if action is None or isinstance(action, ActionEncoder):
        return action
    if not isinstance(action, str):
        return ActionEncoder(action)
    if action == JSON:
        return ActionEncoder(json.loads)
    if ":" in action:
        return ActionEncoder(attribute_at(action, "action"))
    return ActionEncoder(lambda text: {action: text.strip()}, frozenset((action,)))


def observation_renderer(text: str | ObservationRenderer | None) -> ObservationRenderer:
    """The renderer of observations."""
    if text is None:
        return _plain
    if not isinstance(text, str):
        return text
    if ":" in text:
        found: ObservationRenderer = attribute_at(text, "text")
        return found
    return lambda observation: str(observation[text])


def sole_text_field(schema: Mapping[str, Any], host: str) -> str:
    """The field of an action that takes the policy's text: the only one but `metadata`, or the only required one."""
    named = [name for name in schema.get("properties", {}) if name != "metadata"]
    needed = [name for name in schema.get("required", ()) if name in named]
    for names in (named, needed):
        if len(names) == 1:
            return str(names[0])
    raise EnvironmentFault(host, f"actions have the fields {named}, and the spec names none (`action`)")


def _plain(observation: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
