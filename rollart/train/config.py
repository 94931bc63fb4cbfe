"""What `trainer.json` may say: dataclasses, parsed strictly so that a misspelt key is an error and not a default."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rollart.errors import UsageError

__all__ = [
    "AdvantageConfig",
    "DomainConfig",
    "ImitationConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainerConfig",
    "load_config",
    "parse_config",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The policy: a Hugging Face directory (`path`), or a fresh one made from a config dict (`init`) and `seed`.

    `dtype` of its weights and of everything that is computed with them; engines read versions of either."""

    path: str | None = None
    init: dict[str, Any] | None = None
    seed: int = 0
    attention: Literal["sdpa", "eager"] = "sdpa"
    dtype: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.init is None):
            raise ValueError("give exactly one of 'path' (a Hugging Face directory) and 'init' (a model config)")


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW. The learning rate rises linearly over the first `warmup` updates, and falls linearly to `DECAYED` of `lr`
    over `decay_steps` versions (0: it stays); `grad_clip` 0 is off."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup: int = 0
    decay_steps: int = 0

    def __post_init__(self) -> None:
        if min(self.lr, self.grad_clip, self.warmup, self.decay_steps, self.weight_decay) < 0:
            raise ValueError("lr, grad_clip, warmup, decay_steps and weight_decay must not be negative")


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The policy loss (`losses.py` has the formulas). `cap` bounds the importance weight of `decoupled` and `tis`.

    `domain_balance` averages each domain's tokens by themselves before the weighted mean over domains, so that a
    domain with long answers does not drown one with short answers. `kl` is the factor of the estimated KL to the
    reference policy, the version 0 under `weights_root`; at 0 there is none.
    """

    kind: Literal["pg", "ppo", "decoupled", "tis"] = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    cap: float = 2.0
    entropy: float = 0.0
    kl: float = 0.0
    domain_balance: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1 or self.clip_high <= 0 or self.cap <= 0:
            raise ValueError("clip_low must be in (0, 1], clip_high and cap positive")
        if self.kl < 0:
            raise ValueError(f"kl must not be negative, got {self.kl}")


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """How a domain's rewards become advantages (`advantages.py` has the formulas)."""

    level: Literal["token", "turn", "trajectory"] = "turn"
    gamma: float = 1.0
    baseline: Literal["domain", "group", "none"] = "domain"
    group_std: bool = False
    normalize: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must be in [0, 1], got {self.gamma}")
        if self.group_std and self.baseline != "group":
            raise ValueError("group_std needs baseline 'group'")


@dataclass(frozen=True, slots=True)
class DomainConfig:
    """One domain's credit assignment and its weight in the loss."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight must be positive, got {self.weight}")


@dataclass(frozen=True, slots=True)
class ImitationConfig:
    """The warm start: its own learning rate and mini-batch size (samples), and the loss at which it is enough."""

    lr: float = 1e-3
    batch: int = 32
    stop_loss: float | None = None

    def __post_init__(self) -> None:
        if self.batch < 1 or self.lr < 0:
            raise ValueError("batch must be at least 1 and lr not negative")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685) in place of training all weights. `targets` are names of linear modules, or
    `all-linear`: all but the output head. `alpha` / `rank` scales what an adapter adds."""

    rank: int = 16
    alpha: float = 32.0
    targets: list[str] = field(default_factory=lambda: ["all-linear"])

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or not self.targets:
            raise ValueError("rank must be at least 1, alpha positive, and targets not empty")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Over how many processes the trainer is spread (FSDP2), and what it trades for memory and speed.

    `dtype` is what is computed with; weights, their gradients' sums and the optimizer stay in the model's. Versions
    of more than one rank are written in files of at most `bucket_mb` (1e6 bytes), or of one larger tensor."""

    ranks: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    compile: bool = False
    bucket_mb: int = 1000

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.bucket_mb < 1:
            raise ValueError("ranks and bucket_mb must be at least 1")

    @property
    def sharded(self) -> bool:
        """Whether parameters are FSDP2's: with one rank only for its mixed precision."""
        return self.ranks > 1 or self.dtype != "float32"


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Everything the trainer process is told.

    `tokenizer` is a `tokenizer.json` or a directory with one; it is copied into every published version.
    `max_tokens_per_microbatch` counts padded tokens. On a CPU 1,000 to 4,000 cost the same; 8,000 at once cost 20–50 %
    more (caches, page faults). A GPU wants as many as its memory holds.
    `stream` takes a step's gradient group by group (`stream.py`), in `train` as well: one update per step, and no
    advantage that is measured against the whole batch.
    `durable` fsyncs a published version before it becomes visible.
    """

    model: ModelConfig
    weights_root: str
    tokenizer: str | None = None
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    domains: dict[str, DomainConfig] = field(default_factory=dict)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    lora: LoraConfig | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    epochs: int = 1
    minibatches: int = 1
    stream: bool = False
    max_tokens_per_microbatch: int = 2048
    temperature: float = 1.0
    threads: int = 1
    device: str = "cpu"
    durable: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "max_tokens_per_microbatch", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}: greedy has no log-probabilities")
        if self.stream:
            self._streams()

    def _streams(self) -> None:
        if self.parallel.sharded:
            raise ValueError(
                "stream sums gradients in one process in full precision: set parallel.ranks to 1 and parallel.dtype to "
                "float32, or stream to false"
            )
        if self.epochs > 1 or self.minibatches > 1:
            raise ValueError(
                f"stream makes one update of one pass, got epochs {self.epochs} and minibatches {self.minibatches}: "
                "set both to 1, or stream to false"
            )
        for name, domain in self.domains.items():
            if domain.advantage.baseline == "domain":
                raise ValueError(
                    f"stream: domain {name!r} has the advantage baseline 'domain', a mean that is known only with the "
                    "whole batch: use 'group' or 'none', or set stream to false"
                )


def load_config(path: str | Path) -> TrainerConfig:
    """Read and check a config file. `UsageError`, one line, names the file and the key that is wrong."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    try:
        return parse_config(raw)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def parse_config(raw: object) -> TrainerConfig:
    """`ValueError` names the key that is wrong."""
    return _dataclass(TrainerConfig, raw, "config")


def _dataclass(cls: type[T], raw: object, where: str) -> T:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where}: expected an object, got {raw!r}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(raw) - set(fields)):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}, the keys are {', '.join(fields)}")
    required = {
        n for n, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }  # fmt: skip
    if missing := sorted(required - set(raw)):
        raise ValueError(f"{where}: {missing[0]!r} is missing")
    values = {name: _value(hints[name], value, f"{where}.{name}") for name, value in raw.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _value(hint: Any, raw: object, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if raw is None else _value(next(a for a in args if a is not type(None)), raw, where)
    if dataclasses.is_dataclass(hint):
        return _dataclass(typing.cast(type[Any], hint), raw, where)
    if origin is Literal:
        if raw not in args:
            raise ValueError(f"{where}: {raw!r} is not one of {', '.join(map(str, args))}")
        return raw
    if origin is dict:
        if not isinstance(raw, Mapping):
            raise ValueError(f"{where}: expected an object, got {raw!r}")
        return {str(k): _value(args[1], v, f"{where}.{k}") for k, v in raw.items()}
    if origin is list:
        if not isinstance(raw, list):
            raise ValueError(f"{where}: expected a list, got {raw!r}")
        return [_value(args[0], v, where) for v in raw]
    if origin is tuple:
        if not isinstance(raw, list | tuple) or len(raw) != len(args):
            raise ValueError(f"{where}: expected {len(args)} numbers, got {raw!r}")
        return tuple(_value(a, v, where) for a, v in zip(args, raw, strict=True))
    return raw if hint is Any else _scalar(hint, raw, where)


def _scalar(hint: type, raw: object, where: str) -> object:
    if hint is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(raw, hint) and (hint is bool or not isinstance(raw, bool)):
        return raw
    raise ValueError(f"{where}: expected {hint.__name__}, got {raw!r}")
