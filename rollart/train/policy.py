"""The model: loading, adapters, sharding, and the log-probabilities and entropies of loss tokens.

Logits and the last layer's MLP are computed only at loss tokens: with one layer and one action token in six this saves
a quarter of a step. Log-probabilities of tokens with a legal set are normalised over it, and only its columns are read.

On several devices parameters are sharded (FSDP2). They keep their Hugging Face names, since no module is wrapped: a
block's `forward` is replaced, and `fully_shard` changes parameters in place.

Low-rank adapters (`peft`, extra `lora`) are injected into the model. A version's weights are W + (alpha / rank) B A,
which the trainer publishes merged, under the names of W, or apart (`rollart.lora`). With several, a micro-batch is
computed with one of them.
"""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollart.architecture import ATTENTION_LINEAR, MARKER, version_path
from rollart.errors import TrainerError, UsageError, first_line
from rollart.lora import Adapter, base_directory, merge, read_adapter, read_adapters
from rollart.settings.training import LoraSpec, ParallelConfig, PolicyConfig, TrainerConfig
from rollart.train.advantages import domain_credit
from rollart.train.batch import FloatArray, TrainingBatch, select_samples
from rollart.train.microbatch import MicroBatch, build_microbatch
from rollart.train.ranks import Ranks
from rollart.train.routing import RouterReplay, expert_layers

ILLEGAL_LOGIT = -1e30
"""Logit of an illegal action. Its probability is exactly 0 and, unlike with −inf, 0 × log 0 is 0 in the entropy."""

MAX_ROUNDING_ERROR = 0.03
"""Relative difference that bfloat16 rounding explains; a different computation would differ by about 1."""

ADAPTER = "default"
"""The only adapter's name in peft's parameter names, and the beginning of those of several."""


def load_model(config: PolicyConfig, device: str, *, as_stored: bool = False) -> nn.Module:
    """The policy in full precision and in eval mode (no dropout: log-probabilities must equal the engine's).
    `as_stored`: in the checkpoint's own type, memory-mapped from its files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = parameter_dtype(config)
    # None: sdpa for all models but those with soft caps of scores, which it cannot compute.
    attention = None if config.attention == "sdpa" else config.attention
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
            adapter = read_adapter(config.path)
            model = AutoModelForCausalLM.from_pretrained(
                base_directory(config.path),
                dtype="auto" if as_stored and adapter is None else dtype,
                attn_implementation=attention,
                local_files_only=True,
            )
            if adapter is not None:
                _merge_into(model, adapter)
        except Exception as error:
            raise UsageError(f"cannot load the model at {config.path}: {first_line(error)}") from error
    else:
        init = dict(config.init or {})
        try:
            shape = AutoConfig.for_model(init.pop("model_type", "qwen3"), **init)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation=attention)
        except Exception as error:
            raise UsageError(f"model.init does not describe a model: {first_line(error)}") from error
    if dtype == torch.float64:  # grouped products of experts have no such type
        model.set_experts_implementation("eager")
    module: nn.Module = model.to(where).eval()
    return module


def _merge_into(model: nn.Module, adapter: Adapter) -> None:
    parameters = dict(model.named_parameters())
    adapter.check({name: parameter.shape for name, parameter in parameters.items()})
    with torch.no_grad():
        for name in adapter.factors:
            parameters[name].copy_(adapter.merged(name, parameters[name]))


def parameter_dtype(config: PolicyConfig) -> torch.dtype:
    """The type of trained weights."""
    return torch.float64 if config.dtype == "float64" else torch.float32


class TrainedModel:
    """A decoder with an output head, in one process or sharded over `ranks`."""

    def __init__(
        self,
        model: Any,
        *,
        parallel: ParallelConfig | None = None,
        ranks: Ranks | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype`: type of the parameters after sharding; by default the model's."""
        self.model = model
        first = next(model.parameters())
        self.device: torch.device = first.device
        self.dtype = torch.promote_types(dtype or first.dtype, torch.float32)
        self.scorer = Scorer(model)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        with torch.no_grad():
            ids = torch.arange(min(4, self.vocab_size), device=self.device)[None]
            whole = model(input_ids=ids, use_cache=False).logits.float()
            ours = self.scorer.logits(self.scorer.body(input_ids=ids, use_cache=False).last_hidden_state).float()
        if not torch.allclose(whole, ours, atol=1e-4, rtol=1e-4):  # scales, biases: trained wrongly
            raise UsageError(f"{type(model).__name__} transforms its logits after the output head: not supported")
        if getattr(model.config, "sliding_window", None) is None:  # without a mask, windows would be ignored
            self.scorer.trims_last_layer = self._matches_model(self.scorer.last_layer_trimmed)
        self._sharded = ranks is not None and ranks.mesh is not None
        if parallel is not None:
            self._distribute(parallel, ranks or Ranks(), dtype)
            self.device = next(model.parameters()).device

    def reshard(self) -> None:
        """Reshard the parameters. After a forward pass without a backward pass, parameters outside all blocks stay
        gathered, rounded to the compute type, in place of their shards: the model must not be read or written in that
        state."""
        if self._sharded:
            from torch.distributed.fsdp import FSDPModule

            for part in self.scorer.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def _matches_model(self, shortcut: Callable[[Tensor, Tensor], Tensor]) -> bool:
        """True if a shortcut computes the same as the model; tried once, on two rows of four tokens."""
        ids = (torch.arange(8, device=self.device) % self.vocab_size).reshape(2, 4)
        at = torch.tensor([1, 3, 6], device=self.device)
        with torch.no_grad():
            try:
                whole, ours = self.scorer.whole(ids, at), shortcut(ids, at)
                if whole.dtype.itemsize == 2:  # a product of fewer rows may round differently
                    return bool((whole - ours).float().norm() <= MAX_ROUNDING_ERROR * whole.float().norm())
                return torch.allclose(whole, ours, atol=1e-5, rtol=1e-4)
            except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
                return False  # another architecture: the general path is slower but correct

    def _distribute(self, config: ParallelConfig, ranks: Ranks, dtype: torch.dtype | None) -> None:
        """Prepare the model for several devices: compilation, activation checkpointing, and parameters that are
        converted to `dtype`, if given, and sharded. Blocks are gathered, run and released one after the other;
        parameters outside all blocks (embeddings, head, norms) stay gathered during a step."""
        blocks = self.scorer.blocks()
        for block in blocks:
            if config.compile:
                block.forward = torch.compile(block.forward, dynamic=True)
            if config.activation_checkpointing:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if ranks.mesh is None:
            return
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if config.dtype == "bfloat16":
            # Gradients are summed over the ranks in full precision: a sum of 64 terms in bf16 loses its last bits.
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in (*blocks, self.scorer):  # one at a time, which limits the peak memory of the conversion
            if dtype is not None:
                for parameter in block.parameters():
                    if local_rows(parameter) is parameter:  # not sharded yet
                        parameter.data = parameter.data.to(dtype)
            fully_shard(block, mesh=ranks.mesh, mp_policy=policy)
        for part in (*blocks, self.scorer):
            assert isinstance(part, FSDPModule)
            # The loss is a share of the whole mini-batch's (`losses.py`), so gradients are summed, not averaged.
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


class TrainedPolicy(TrainedModel):
    """A causal language model at its sampling temperature."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        parallel: ParallelConfig | None = None,
        ranks: Ranks | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.temperature = temperature
        self._adapted = [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "set_adapter")]
        self._active = ""
        self.experts, routers = expert_layers(model)
        """The layers with experts whose choices can be replayed; None for a model without."""
        self._replay = RouterReplay(routers) if routers else None
        super().__init__(model, parallel=parallel, ranks=ranks, dtype=dtype)

    def score(self, micro: MicroBatch, actions: ActionTensors, *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [M] of a micro-batch's loss tokens, in the order of `micro.pick`."""
        self._activate(micro.adapter)
        if self._replay is not None:
            self._replay.chosen = micro.experts
        logits = self.scorer(micro.ids, micro.at).to(self.dtype)
        if self._replay is not None and not torch.is_grad_enabled():
            self._replay.chosen = None
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

    def _activate(self, adapter: str) -> None:
        """Compute with this adapter from now on. All of them stay trainable: peft would freeze the others."""
        if adapter == self._active:
            return
        for layer in self._adapted:
            layer.set_adapter(peft_name(adapter))
        _unfreeze(self.model)
        self._active = adapter

    def loss_tokens(self, batch: TrainingBatch, column: FloatArray) -> Tensor:
        """The loss tokens [N] of a column [T], on the device."""
        return torch.from_numpy(column[batch.loss.position]).to(self.device, self.dtype)


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
    """Computes the outputs of the head at loss tokens: logits, or values (`critic.py`). A single module, so that FSDP2
    sees one forward pass."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body = model.base_model
        self.head = model.get_output_embeddings()
        self.cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self.trims_last_layer = False

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        """[rows, longest] token ids, flat positions [M] in them -> logits [M, vocabulary]."""
        hidden = self.last_layer_trimmed if self.trims_last_layer else self.whole
        return self.logits(hidden(ids, at))

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., hidden] -> logits [..., vocabulary], with the soft cap of Gemma 2."""
        logits: Tensor = self.head(hidden)
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

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


class ReferencePolicy:
    """The reference policy of a KL penalty: the run's first version, another checkpoint (`loss.reference`), or the
    latest version whose number is a multiple of `loss.reference_reset`. Owns the model, which is loaded on first use,
    after the version is published. Thread-safe; calls run one at a time.

    Every sample has a separate forward pass. Its log-probabilities therefore do not depend on the rest of the batch,
    and are bit for bit the same when computed on arrival or in the training step.
    """

    def __init__(self, config: TrainerConfig, vocab_size: int) -> None:
        """`vocab_size`: the policy's, which a reference must have as well."""
        self._config, self._vocab_size = config, vocab_size
        self._policy: TrainedPolicy | None = None
        self._number = 0
        self._lock = threading.Lock()

    def logprobs(self, batch: TrainingBatch, version: int = 0) -> FloatArray:
        """Log-probability of every token [T] in a step that trains `version`, 0.0 for tokens without loss.
        `TrainerError` if the reference does not exist, or has another vocabulary."""
        out = np.zeros(len(batch.tokens), np.float64)
        batch = replace(batch, experts=None)  # the experts are the policy's: the reference chooses its own
        with self._lock, torch.no_grad():
            policy = self._loaded(version)
            for s in np.flatnonzero(batch.used_lengths > 0):
                one = select_samples(batch, np.array([s], np.int64))
                adapter = sample_adapters(one, self._config)[0]
                micro = build_microbatch(one, np.zeros(1, np.int64), one.used_lengths, policy.device, adapter)
                scored, _ = policy.score(micro, ActionTensors(one, policy.device), entropy_grad=False)
                at = one.loss.position[micro.pick.cpu().numpy()] + batch.offsets[s]
                out[at] = scored.double().cpu().numpy()
        return out

    def column(self, batch: TrainingBatch, version: int) -> FloatArray:
        """The same, taken from the batch if it contains them."""
        return self.logprobs(batch, version) if batch.reference is None else batch.reference

    def _loaded(self, version: int) -> TrainedPolicy:
        loss = self._config.loss
        number = version - version % loss.reference_reset if loss.reference_reset else 0
        if self._policy is None or number != self._number:
            path = version_path(Path(self._config.weights_root), number)
            if isinstance(loss.reference, str):
                path = Path(loss.reference)
            elif not (path / MARKER).is_file():
                raise TrainerError(
                    f"the reference policy is version {number}, which is not at {path}",
                    remedy="a run that has pruned it cannot take up a KL penalty: start a new one",
                )
            self._policy, self._number = None, number  # frees the old model before the new one is loaded
            loaded = TrainedPolicy(self._model(path), temperature=self._config.temperature)
            if loaded.vocab_size != self._vocab_size:  # log-probabilities of other tokens
                raise TrainerError(
                    f"the reference policy at {path} has a vocabulary of {loaded.vocab_size} (rule: "
                    f"{self._vocab_size}, the policy's)",
                    remedy="give training.loss.reference a model with the policy's tokenizer",
                )
            self._policy = loaded
            if self._config.parallel.dtype == "bfloat16":
                # The policy's compute type, so that equal models give equal log-probabilities. Parameters only: rounded
                # rotary frequencies would be useless.
                for parameter in self._policy.model.parameters():
                    parameter.data = parameter.data.to(torch.bfloat16)
        return self._policy

    def _model(self, path: Path) -> nn.Module:
        """The model of a directory, with the adapters of a version of the run's own that has several."""
        lora = None if isinstance(self._config.loss.reference, str) else self._config.lora
        try:
            adapters = {} if lora is None else read_adapters(path)
        except (OSError, ValueError) as error:
            raise TrainerError(f"cannot load the model at {path}: {first_line(error)}") from None
        below = base_directory(path) if adapters else path
        model = load_model(
            self._config.model.model_copy(update={"path": str(below), "init": None}), self._config.device
        )
        if adapters:
            assert lora is not None, "else there are none"
            inject_adapters(model, lora, self._config.seed, tuple(adapters))
            with torch.no_grad():
                for name, adapter in adapters.items():
                    for weight, tensor in published_tensors(model, name).items():
                        for own, factor in zip(tensor.parts[1:], adapter.factors.get(weight, ()), strict=True):
                            own.copy_(factor)
        return model


def full(tensor: Tensor) -> Tensor:
    """A scalar that the ranks share, as a plain tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> Tensor:
    """The rows of a parameter on this rank; all rows if it is not sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True)
class AdaptedTensor:
    """A tensor of a version: `base`, plus `scale` × `b` @ `a` if it has an adapter. May be sharded by rows."""

    base: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 0.0

    @property
    def parts(self) -> list[Tensor]:
        return [t for t in (self.base, self.a, self.b) if t is not None]

    @staticmethod
    def merge(parts: list[Tensor], scale: float) -> Tensor:
        """The merged tensor of whole parts, in the order of `parts`."""
        if len(parts) == 1:
            return parts[0]
        base, a, b = parts
        return merge(base, a, b, scale)


def peft_name(adapter: str) -> str:
    """An adapter's name in peft's parameter names. Its own may be that of a module's method, which peft refuses."""
    return f"{ADAPTER}_{adapter}" if adapter else ADAPTER


def sample_adapters(batch: TrainingBatch, config: TrainerConfig) -> list[str]:
    """The adapter of each sample [S]. `ValueError` for a domain that is not configured, if there are several."""
    if not any(config.adapters):
        return [""] * len(batch)
    of_domain = [domain_credit(config.domains, name).adapter or "" for name in batch.domains]
    return [of_domain[domain] for domain in batch.domain]


def inject_adapters(model: nn.Module, config: LoraSpec, seed: int, names: Sequence[str]) -> None:
    """Inject adapters into the model and freeze the rest. They start at zero, with no effect on the policy, and all
    alike. `UsageError` if peft is missing or finds no such module."""
    try:
        import peft
    except ImportError as error:
        raise UsageError("training.lora needs peft", remedy="pip install 'rollart[lora]'") from error
    targets: Any = "all-linear" if config.targets == ["all-linear"] else config.targets
    if expert_layers(model)[0] is not None:
        targets = ATTENTION_LINEAR if targets == "all-linear" else targets
        if other := [name for name in targets if name.rpartition(".")[2] not in ATTENTION_LINEAR]:
            rule = f"in a model with experts: {', '.join(ATTENTION_LINEAR)}"
            raise UsageError(f"training.lora.targets has '{other[0]}' (rule: {rule})")
        targets = list(targets)
    setup = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0)
    try:
        for name in names:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # of the adapter before
                torch.manual_seed(seed)
                peft.inject_adapter_in_model(copy.deepcopy(setup), model, adapter_name=peft_name(name))
    except ValueError as error:
        raise UsageError(f"training.lora.targets {config.targets}: {str(error).splitlines()[0]}") from error
    if len(names) > 1:
        _unfreeze(model)


def _unfreeze(model: nn.Module) -> None:
    for parameter in adapter_tensors(model).values():
        parameter.requires_grad_(True)


def published_tensors(model: Any, adapter: str = "") -> dict[str, AdaptedTensor]:
    """Tensors of a version, with one of its adapters, by Hugging Face name. A tied tensor appears once, under its first
    name, as in `save_pretrained`."""
    state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    out: dict[str, AdaptedTensor] = {}
    visited: set[int] = set()
    for name, tensor in state.items():
        if ".lora_" in name or id(tensor) in visited:
            continue
        visited.add(id(tensor))
        holder, _, leaf = name.rpartition(".base_layer.")
        if not holder:
            out[name] = AdaptedTensor(tensor)
        elif leaf != "weight":
            out[f"{holder}.{leaf}"] = AdaptedTensor(tensor)
        else:
            own = peft_name(adapter)
            a, b = (state[f"{holder}.{which}.{own}.weight"] for which in ("lora_A", "lora_B"))
            out[f"{holder}.weight"] = AdaptedTensor(tensor, a, b, float(model.get_submodule(holder).scaling[own]))
    return out


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' own parameters, by name."""
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


def _score(logits: Tensor, index: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    every = F.log_softmax(logits, dim=-1)
    chosen = every.gather(1, index[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(every.exp() * every).sum(-1)
    return chosen, entropy
