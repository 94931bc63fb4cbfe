"""The secrets of a function inside its process: read from its environment or fetched from AWS, masked in its output.

Packed with functions that have secrets. Standard library only; boto3 is the runtime's own, and imported on AWS alone.

On AWS Lambda the variable `ROLLART_SECRETS` holds references, never values:
`{"ttl_s": seconds, "from": {NAME: {"aws_secret": id, "key": key of its JSON object or ""} or {"ssm": parameter}}}`.
They are fetched when the function loads, and again by the first call after `ttl_s`. If a value has changed, the
function is loaded again, so that code that read the variable while loading has the new value too.
"""
# ruff: noqa: TID251 - a worker process measures its own time; the loop's clock is in another process.

from __future__ import annotations

import base64
import json
import os
import pathlib
import re
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

REFERENCES = "ROLLART_SECRETS"

_SHORTEST = 4
"""Characters of the shortest value that is masked: masking shorter ones would destroy any output."""

_SHORTEST_LINE = 12
"""Characters of a line of a multi-line value (a key in PEM form) that is masked by itself."""

_RETRY_S = 30.0
"""Seconds before a failed refresh is repeated. The values before it stay in use."""


_PROTOCOL_FIELDS = frozenset({"id", "kind", "throttle"})
"""Fields of an answer with values of ours, in which a secret such as `test` may stand by chance."""


class Mask:
    """Replaces values of secrets in texts, also as JSON, URL, base64 and hex encode them."""

    def __init__(self, *values: Mapping[str, str]) -> None:
        forms = {form: name for one in values for name, value in one.items() for form in _forms(value)}
        self._names = {form.encode(): name for form, name in forms.items()}
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, longest_first))) if longest_first else None

    def data(self, data: bytes) -> bytes:
        if self._pattern is None:
            return data
        return self._pattern.sub(lambda found: b"[secret %s]" % self._names[found[0]].encode(), data)

    def text(self, text: str) -> str:
        data = text.encode(errors="surrogatepass")
        masked = self.data(data)
        return text if masked is data or masked == data else masked.decode(errors="surrogatepass")

    def tree(self, value: Any) -> Any:
        """A JSON value with masked texts, keys included; those of protocol fields stay."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.tree(k): one if k in _PROTOCOL_FIELDS else self.tree(one) for k, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(one) for one in value]
        return value

    def error(self, error: Exception | SystemExit) -> Exception | SystemExit:
        """The error, or one of the same type's name with a masked message."""
        text = str(error)
        masked = self.text(text)
        if masked == text:
            return error
        if isinstance(error, SystemExit):
            return SystemExit(masked)
        kind: type[Exception] = type(type(error).__name__, (Exception,), {"__module__": type(error).__module__})
        return kind(masked)


def _forms(value: str) -> Iterator[str]:
    lines = [line.strip() for line in value.splitlines()]
    parts = [value, *(line for line in lines if len(lines) > 1 and len(line) >= _SHORTEST_LINE)]
    for part in parts:
        if len(part) < _SHORTEST:
            continue
        yield part
        for encode in (urllib.parse.quote, urllib.parse.quote_plus):
            yield encode(part, safe="")
            yield encode(part, safe="/")
        yield json.dumps(part)[1:-1]
        yield repr(part)[1:-1]
        raw = part.encode()
        yield raw.hex()
        yield raw.hex().upper()
        for before in range(3):  # base64 of a longer text that holds the value, by its offset in groups of three bytes
            encoded = base64.b64encode(b"\0" * before + raw).decode().rstrip("=")
            kept = encoded[(0, 2, 3)[before] : len(encoded) - (1 if (before + len(raw)) % 3 else 0)]
            if len(kept) > _SHORTEST:
                yield kept
                yield kept.translate(str.maketrans("+/", "-_"))


class _MaskedStream:
    """A text stream that masks each write. A value that is split over two writes is not recognised."""

    def __init__(self, stream: Any, masked: Callable[[], Mask]) -> None:
        self._stream = stream
        self._masked = masked

    def write(self, text: str) -> int:
        self._stream.write(self._masked().text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class GuardedFunction:
    """A loaded function, its secrets in `os.environ`, and its masked output.

    `load` loads the function whose source is in `directory`; it is called again when a value has changed. Calls do not
    overlap.
    """

    def __init__(
        self, names: Iterable[str], directory: pathlib.Path, load: Callable[[], Callable[[Any, Any], Any]]
    ) -> None:
        given = json.loads(os.environ.get(REFERENCES) or "{}")
        self._names = tuple(names)
        self._directory = str(directory)
        self._load = load
        self._references: dict[str, dict[str, str]] = given.get("from", {})
        self._ttl_s = float(given.get("ttl_s", 0.0))
        self._due = time.monotonic() + self._ttl_s
        os.environ.update(_fetched(self._references))
        missing = [name for name in self._names if not os.environ.get(name)]
        if missing:
            raise RuntimeError(f"the secret {missing[0]} is not set in the function's environment")
        self._values = self._present()
        self._mask = Mask(self._values)
        self._stale = False
        sys.stdout = _MaskedStream(sys.stdout, lambda: self._mask)
        sys.stderr = _MaskedStream(sys.stderr, lambda: self._mask)
        if "AWS_LAMBDA_RUNTIME_API" in os.environ:
            self._mask_records()
        self._call = self._loaded()

    def __call__(self, event: Any, context: Any) -> Any:
        if self._references and time.monotonic() >= self._due:
            self._refresh()
        if self._stale:
            self._reload()
        try:
            return self._mask.tree(self._call(event, context))
        except (Exception, SystemExit) as error:
            masked = self._mask.error(error)
            if masked is error:
                raise
        raise masked

    def _loaded(self) -> Callable[[Any, Any], Any]:
        try:
            return self._load()
        except (Exception, SystemExit) as error:
            masked = self._mask.error(error)
            if masked is error:
                raise
        raise masked

    def _present(self) -> dict[str, str]:
        return {name: os.environ[name] for name in self._names}

    def _refresh(self) -> None:
        """Fetch the values again. The function has to be loaded again if one has changed."""
        try:
            found = _fetched(self._references)
        except Exception as error:
            self._due = time.monotonic() + _RETRY_S
            print(f"the values before it stay in use: {self._mask.text(str(error))}", file=sys.stderr)
            return
        self._due = time.monotonic() + self._ttl_s
        if any(os.environ.get(name) != value for name, value in found.items()):
            os.environ.update(found)
            former, self._values = self._values, self._present()
            self._mask = Mask(self._values, former)
            self._stale = True

    def _reload(self) -> None:
        """Load the function again. If that fails, the call fails, and the next one tries again."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(self._directory):
                del sys.modules[name]
        loaded = self._loaded()
        if (close := getattr(self._call, "close", None)) is not None:
            close()
        self._call, self._stale = loaded, False

    def _mask_records(self) -> None:
        """AWS's runtime writes log records past `sys.stdout`."""
        import logging

        made = logging.getLogRecordFactory()
        formatter = logging.Formatter()

        def masked(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = made(*args, **kwargs)
            record.msg, record.args = self._mask.text(record.getMessage()), ()
            if record.exc_info:
                record.exc_text = self._mask.text(formatter.formatException(record.exc_info))
            return record

        logging.setLogRecordFactory(masked)


def _fetched(references: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The values of references. Raises `RuntimeError` with the variable's name and AWS's refusal."""
    if not references:
        return {}
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise RuntimeError("boto3 is not in the function's runtime: add it to the requirements") from None
    config = Config(connect_timeout=2, read_timeout=5, retries={"mode": "standard", "total_max_attempts": 3})
    clients: dict[tuple[str, str | None], Any] = {}
    read: dict[tuple[str, str], str] = {}

    def client(service: str, reference: str) -> Any:
        region = reference.split(":")[3] if reference.startswith("arn:") else None
        if (service, region) not in clients:
            clients[service, region] = boto3.client(service, region_name=region, config=config)
        return clients[service, region]

    def value(kind: str, reference: str) -> str:
        if kind == "ssm":
            answer = client("ssm", reference).get_parameter(Name=reference, WithDecryption=True)
            return str(answer["Parameter"]["Value"])
        answer = client("secretsmanager", reference).get_secret_value(SecretId=reference)
        return str(answer["SecretString"]) if "SecretString" in answer else answer["SecretBinary"].decode()

    found = {}
    for name, one in references.items():
        kind = "ssm" if "ssm" in one else "aws_secret"
        reference, key = one[kind], one.get("key", "")
        try:
            if (kind, reference) not in read:
                read[kind, reference] = value(kind, reference)
        except Exception as error:
            raise RuntimeError(f"the secret {name} ({reference}): {type(error).__name__}: {error}") from None
        found[name] = _member(name, reference, read[kind, reference], key) if key else read[kind, reference]
    return found


def _member(name: str, reference: str, text: str, key: str) -> str:
    try:
        return str(json.loads(text)[key])
    except (ValueError, KeyError, TypeError):
        raise RuntimeError(f"the secret {name} ({reference}) is no JSON object with the key {key}") from None
