"""The model: loading, and log-probabilities and entropies of loss tokens.

Logits and the last layer's MLP are computed only at loss tokens: with one layer and one action token in six this saves
a quarter of a step. Log-probabilities of tokens with a legal set are normalised over it, and only its columns are read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollart.errors import UsageError
from rollart.learning import ParallelConfig, PolicyConfig
from rollart.train.batch import TrainingBatch
from rollart.train.microbatch import MicroBatch
from rollart.train.ranks import Ranks
from rollart.train.shard import prepare_model, release_gathered

ILLEGAL_LOGIT = -1e30
"""Logit of an illegal action. Its probability is exactly 0 and, unlike with −inf, 0 × log 0 is 0 in the entropy."""


MAX_ROUNDING_ERROR = 0.03
"""Relative difference that bfloat16 rounding explains; a different computation would differ by about 1."""


class ActionTensors:
    """The loss tokens of a batch on the device: sampled token ids and legal sets."""

    def __init__(self, batch: TrainingBatch, device: torch.device) -> None:
        at = batch.loss.position
        self.target = torch.from_numpy(batch.tokens[at]).to(device)
        self.slot = torch.from_numpy(batch.loss.slot).to(device)
        self.legal = torch.from_numpy(batch.legal[at]).to(device)
        self.legal_ids = torch.from_numpy(batch.sets.ids).to(device)
        self.legal_valid = torch.from_numpy(batch.sets.valid).to(device)


class Scorer(nn.Module):
    """Computes logits at loss tokens. A single module, so that FSDP2 sees one forward pass."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body = model.base_model
        self.head = model.get_output_embeddings()
        self.trims_last_layer = False

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        """[rows, longest] token ids, flat positions [M] in them -> logits [M, vocabulary]."""
        hidden = self.last_layer_trimmed if self.trims_last_layer else self.whole
        logits: Tensor = self.head(hidden(ids, at))
        return logits

    def whole(self, ids: Tensor, at: Tensor) -> Tensor:
        """Final hidden states [M, hidden] at the flat positions `at` of `ids` [rows, longest], for any architecture."""
        hidden: Tensor = self.body(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, at)

    def last_layer_trimmed(self, ids: Tensor, at: Tensor) -> Tensor:
        """The same for decoders built like Llama and Qwen, restricted to the wanted positions after the last
        attention."""
        body = self.body
        x = body.embed_tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rotary = body.rotary_emb(x, positions)
        *layers, last = body.layers
        for layer in layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary, use_cache=False)
        attended, _ = last.self_attn(last.input_layernorm(x), position_embeddings=rotary, attention_mask=None)
        x = (x + attended).reshape(-1, x.shape[-1]).index_select(0, at)
        x = x + last.mlp(last.post_attention_layernorm(x))
        hidden: Tensor = body.norm(x)
        return hidden

    def blocks(self) -> list[nn.Module]:
        """The modules that run in sequence and hold most of the parameters."""
        layers = list(getattr(self.body, "layers", ()))
        if self.trims_last_layer:
            last: Any = layers.pop()
            layers += [last.self_attn, last.mlp]
        return layers


class TrainedPolicy:
    """A causal language model at its sampling temperature, in one process or sharded over `ranks`."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        parallel: ParallelConfig | None = None,
        ranks: Ranks | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype`: type of the parameters after sharding; by default the model's."""
        self.model = model
        self.temperature = temperature
        first = next(model.parameters())
        self.device: torch.device = first.device
        self.dtype = torch.promote_types(dtype or first.dtype, torch.float32)
        self._scorer = Scorer(model)
        self.vocab_size = int(self._scorer.head.weight.shape[0])
        self._check_head()
        self._scorer.trims_last_layer = self._matches_model(self._scorer.last_layer_trimmed)
        self._sharded = ranks is not None and ranks.mesh is not None
        if parallel is not None:
            prepare_model(self._scorer, self._scorer.blocks(), parallel, ranks or Ranks(), dtype)
            self.device = next(model.parameters()).device

    @property
    def trims_last_layer(self) -> bool:
        return self._scorer.trims_last_layer

    def reshard(self) -> None:
        """Reshard the parameters. After a forward pass without a backward pass, parameters outside all blocks stay
        gathered, rounded to the compute type, in place of their shards: the model must not be read or written in that
        state."""
        if self._sharded:
            release_gathered(self._scorer)

    def score(self, micro: MicroBatch, actions: ActionTensors, *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [M] of a micro-batch's loss tokens, in the order of `micro.pick`."""
        logits = self._scorer(micro.ids, micro.at).to(self.dtype)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        free, total = micro.free, len(micro.pick)
        parts = []
        if free or not total:
            parts.append(_score(logits[:free], actions.target[micro.pick[:free]], entropy_grad))
        if free < total:
            pick = micro.pick[free:]
            legal = actions.legal[pick]
            narrow = logits[free:].gather(1, actions.legal_ids[legal])
            narrow = narrow.masked_fill(~actions.legal_valid[legal], ILLEGAL_LOGIT)
            parts.append(_score(narrow, actions.slot[pick], entropy_grad))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _matches_model(self, shortcut: Callable[[Tensor, Tensor], Tensor]) -> bool:
        """True if a shortcut computes the same as the model; tried once, on two rows of four tokens."""
        ids = (torch.arange(8, device=self.device) % self.vocab_size).reshape(2, 4)
        at = torch.tensor([1, 3, 6], device=self.device)
        with torch.no_grad():
            try:
                whole, ours = self._scorer.whole(ids, at), shortcut(ids, at)
                if whole.dtype.itemsize == 2:  # a product of fewer rows may round differently
                    return bool((whole - ours).float().norm() <= MAX_ROUNDING_ERROR * whole.float().norm())
                return torch.allclose(whole, ours, atol=1e-5, rtol=1e-4)
            except (AttributeError, TypeError, ValueError, RuntimeError):
                return False  # another architecture: the general path is slower but correct

    def _check_head(self) -> None:
        """Refuse architectures that do more than `head(hidden)` (soft caps, logit scales) instead of training them
        wrongly."""
        with torch.no_grad():
            ids = torch.arange(min(4, self.vocab_size), device=self.device)[None]
            whole = self.model(input_ids=ids, use_cache=False).logits.float()
            ours = self._scorer.head(self._scorer.body(input_ids=ids, use_cache=False).last_hidden_state).float()
        if not torch.allclose(whole, ours, atol=1e-4, rtol=1e-4):
            raise UsageError(f"{type(self.model).__name__} transforms its logits after the output head: not supported")


def parameter_dtype(config: PolicyConfig) -> torch.dtype:
    """The type of trained weights."""
    return torch.float64 if config.dtype == "float64" else torch.float32


def load_model(config: PolicyConfig, device: str, *, as_stored: bool = False) -> nn.Module:
    """The policy in full precision and in eval mode (no dropout: log-probabilities must equal the engine's).
    `as_stored`: in the checkpoint's own type, memory-mapped from its files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = parameter_dtype(config)
    try:
        where = torch.device(device)
        if where.type == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"device {device!r}: torch sees no CUDA device")
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is not a torch device") from error
    if config.path is not None:
        if not (Path(config.path) / "config.json").is_file():
            raise UsageError(f"{config.path} is not a model directory: it has no config.json")
        try:
            model = AutoModelForCausalLM.from_pretrained(
                config.path,
                dtype="auto" if as_stored else dtype,
                attn_implementation=config.attention,
                local_files_only=True,
            )
        except Exception as error:
            raise UsageError(f"cannot load the model at {config.path}: {_first_line(error)}") from error
    else:
        init = dict(config.init or {})
        try:
            shape = AutoConfig.for_model(init.pop("model_type", "qwen3"), **init)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation=config.attention)
        except Exception as error:
            raise UsageError(f"model.init does not describe a model: {_first_line(error)}") from error
    module: nn.Module = model.to(where).eval()
    return module


def _score(logits: Tensor, index: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    every = F.log_softmax(logits, dim=-1)
    chosen = every.gather(1, index[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(every.exp() * every).sum(-1)
    return chosen, entropy


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
