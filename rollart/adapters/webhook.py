"""Notices to people through a webhook, in the format of Slack's incoming webhooks (Mattermost and Rocket.Chat read it
too): a POST of `{"text": ...}`, which answers with a status of 2xx."""

from __future__ import annotations

import asyncio
import functools
import os
import urllib.parse
from collections import deque
from typing import TypeAlias

import aiohttp

from rollart.errors import UsageError
from rollart.ledger.events import NOTICE
from rollart.ports import Recorder, RunEvent
from rollart.settings.base import http_url
from serverless.retries import WEBHOOK, RetryPolicy

ATTEMPT_S = 5.0
"""Longest attempt, in seconds."""

LAST_S = 8.0
"""Longest wait for notices that are not sent when the run ends, in seconds."""

Notice: TypeAlias = tuple[str, str]
"""Topic and text."""


def webhook_url(notify: str) -> str:
    """The URL of a webhook, which may be given by the name of an environment variable. UsageError for a variable that
    is not set, or holds no URL."""
    if "://" in notify:
        return notify
    value = os.environ.get(notify, "")
    try:
        return http_url(value)
    except ValueError:
        state = "holds no http or https URL" if value else "is not set"
        raise UsageError(
            f"budget.notify is {notify}, and this environment variable {state} (rule: the URL of a webhook)",
            remedy=f"export {notify}=https://hooks.slack.com/services/...",
        ) from None


class Webhook:
    """Sends notices one after the other. `post` never waits and never fails; `run` is the task that sends, until it is
    cancelled: it then has `LAST_S` for what is left. Each notice ends in one event, sent or not."""

    def __init__(
        self,
        url: str,
        recorder: Recorder,
        *,
        policy: RetryPolicy = WEBHOOK,
        attempt_s: float = ATTEMPT_S,
        last_s: float = LAST_S,
    ) -> None:
        self._url, self._recorder, self._policy = url, recorder, policy
        self._attempt_s, self._last_s = attempt_s, last_s
        self._host = urllib.parse.urlsplit(url).hostname or ""
        self._pending: deque[Notice] = deque()
        self._posted = asyncio.Event()

    def post(self, topic: str, text: str) -> None:
        self._pending.append((topic, text))
        self._posted.set()

    async def run(self) -> None:
        """Consumes posted notices; waits for the next one, and for the webhook at most `ATTEMPT_S` an attempt."""
        try:
            while True:
                await self._posted.wait()
                await self._send_all()
                self._posted.clear()
        finally:
            try:
                async with asyncio.timeout(self._last_s):
                    await self._send_all()
            except TimeoutError:
                while self._pending:
                    self._done(self._pending.popleft()[0], "the run ended before the webhook answered")

    async def _send_all(self) -> None:
        if not self._pending:
            return
        limit = aiohttp.ClientTimeout(total=self._attempt_s)
        async with aiohttp.ClientSession(timeout=limit, trust_env=True) as session:
            while self._pending:
                topic, text = self._pending[0]
                why = ""
                try:
                    await self._policy.run(functools.partial(self._attempt, session, text), _Unavailable)
                except (_Unavailable, _Refused) as error:
                    why = str(error)
                self._pending.popleft()
                self._done(topic, why)

    async def _attempt(self, session: aiohttp.ClientSession, text: str) -> None:
        try:
            async with session.post(self._url, json={"text": text}, allow_redirects=False) as response:
                status = response.status
        except TimeoutError:
            raise _Unavailable(f"no answer within {self._attempt_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise _Unavailable(error.os_error.strerror or type(error.os_error).__name__) from None
        except (aiohttp.InvalidURL, UnicodeError):
            raise _Refused("not a URL") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Unavailable(type(error).__name__) from None  # its text may have the URL
        if not 200 <= status < 300:
            raise (_Unavailable if status in (408, 429) or status >= 500 else _Refused)(f"status {status}")

    def _done(self, topic: str, why: str) -> None:
        fields: dict[str, str | int | float | bool | None] = {"sent": not why, "host": self._host}
        if why:
            fields["why"] = why
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), NOTICE, topic, fields))


class _Unavailable(Exception):
    """Another attempt may succeed."""


class _Refused(Exception):
    """The webhook does not take the notice."""
