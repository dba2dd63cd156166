"""Hugging Face model directories: written from the stages of a run, and loaded by plain transformers in float32.

The parameters keep their global names in every stage, so the union of the stages is the complete state dict. What
remains is to average replicas, to check that nothing is missing, and to let transformers write its own format. Nothing
here knows where the weights come from.

Shape legend: B microbatch, T sequence, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from noloco_p2p.compute import host_tensor, model_family, replica_tensors
from noloco_p2p.compute.device import as_local
from noloco_p2p.compute.hardware import pick_device, set_threads
from noloco_p2p.compute.model import meta_stage_module
from noloco_p2p.compute.stage import IGNORED
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Batch, LossSum, TensorSpec
from noloco_p2p.core.snapshots import Snapshot
from noloco_p2p.errors import ConfigError, LocalError

TRIMMED_AT_ONCE = 1 << 18
"""How many values of a parameter are sorted at once, each over all replicas."""
CACHES = "cache", "past_key_values"
"""Names of the cache argument in transformers; models of older versions have only the second one."""
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
Weights = Mapping[str, Tensor]
"""θ of one replica or of a mean, by global name, in compute_dtype, in host memory."""


def silence_transformers() -> None:
    """Turn off transformers' progress bars and warnings in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def stage_specs(manifest: RunManifest, index: int) -> tuple[TensorSpec, ...]:
    """The parameters of a stage in order, by global name, in compute_dtype. Allocates no weights.

    Raises ConfigError if the model cannot be built.
    """
    causal = _outlined(manifest, index, manifest.stages)
    return tuple(TensorSpec(name, manifest.compute_dtype, tuple(p.shape)) for name, p in causal.named_parameters())


def fast_weights(snapshot: Snapshot, parameters: Sequence[TensorSpec]) -> Weights:
    """θ_f of a snapshot. Raises Violation like `replica_tensors.checked`."""
    (flat,) = replica_tensors.checked(snapshot.tensors, (flat_weights(parameters),), f"the weights of {snapshot.peer}")
    parts = torch.split(flat, [prod(spec.shape) for spec in parameters])
    return {spec.name: part.view(spec.shape) for spec, part in zip(parameters, parts, strict=True)}


def flat_weights(parameters: Sequence[TensorSpec]) -> TensorSpec:
    """Spec of a stage's θ_f as it travels in full precision."""
    return TensorSpec("weights", parameters[0].dtype, (sum(prod(spec.shape) for spec in parameters),))


def mean(replicas: Sequence[Weights]) -> Weights:
    """The element-wise mean over replicas of one stage, summed in float64 and rounded once to compute_dtype."""
    if len(replicas) == 1:
        return replicas[0]
    merged = {}
    for name, first in replicas[0].items():
        total = first.to(torch.float64, copy=True)
        for other in replicas[1:]:
            total += other[name]
        merged[name] = total.div_(len(replicas)).to(first.dtype)
    return merged


def trimmed_mean(replicas: Sequence[Weights]) -> Weights:
    """As `mean`, but for each value without the largest and the smallest quarter of the replicas, rounded down but at
    least one each (Yin et al., arXiv 1803.01498). Values that are not finite sort among these. Needs three."""
    most, merged = max(1, len(replicas) // 4), {}
    for name, first in replicas[0].items():
        merged[name] = torch.empty_like(first)
        for at in range(0, first.numel(), TRIMMED_AT_ONCE):
            part = slice(at, at + TRIMMED_AT_ONCE)
            values = torch.stack([weights[name].flatten()[part] for weights in replicas]).double()
            merged[name].view(-1)[part] = values.sort(0).values[most:-most].mean(0)
    return merged


def write_model(manifest: RunManifest, stages: Sequence[Weights], directory: Path, eos: int | None = None) -> None:
    """Write config.json, generation_config.json and the safetensors of the complete model to an existing directory.

    `eos` is the id that ends generation, if known. Raises ConfigError if the stages do not make up the complete model,
    LocalError if the directory cannot be written.
    """
    causal = _outlined(manifest, 0, 1)
    state = {name: tensor for weights in stages for name, tensor in weights.items()}
    wanted = {name for name, _ in causal.named_parameters()}
    if set(state) != wanted:
        raise ConfigError(f"the stages do not form a complete model: {', '.join(sorted(wanted ^ set(state))[:3])} …")
    if eos is not None:
        for name in model_family.SPECIAL_IDS:
            setattr(causal.generation_config, name, eos if name == "eos_token_id" else None)
    save(causal, directory, state_dict=state)


def save(it: Any, directory: Path, **options: Any) -> None:
    """Write a model or a tokenizer of transformers. Raises LocalError if the directory cannot be written."""
    try:
        it.save_pretrained(directory, **options)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or model_family.one_line(error)
        raise LocalError(f"{directory} cannot be written: {reason}") from error


def _outlined(manifest: RunManifest, index: int, stages: int) -> Any:
    """A stage's model without memory. Raises ConfigError if it cannot be built."""
    return meta_stage_module(
        model_family.checked_config(manifest), index, stages, dtype=host_tensor.DTYPES[manifest.compute_dtype]
    ).causal


def write_tokenizer(source: str | None, directory: Path) -> None:
    """Write a tokenizer's files: ByT5's for None, else those that AutoTokenizer loads from `source`, a name or path.

    `tokenizers.load_tokenizer` must have accepted `source`. Raises LocalError if the directory cannot be written.
    """
    from transformers.models.byt5 import ByT5Tokenizer

    save(ByT5Tokenizer() if source is None else stored_tokenizer(source), directory)


def stored_tokenizer(source: str | Path, *, local: bool = False) -> Any:
    """The tokenizer in a folder or on the hub. It is ByT5's if its own files say so: next to the config.json of some
    families (mistral, qwen2) AutoTokenizer would take the family's instead. `local`: never from the hub. Raises
    whatever transformers raises."""
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import get_tokenizer_config
    from transformers.models.byt5 import ByT5Tokenizer

    said = get_tokenizer_config(source, local_files_only=local).get("tokenizer_class")
    loader = ByT5Tokenizer if said == ByT5Tokenizer.__name__ else AutoTokenizer
    return loader.from_pretrained(source, local_files_only=local, trust_remote_code=False)


class ExportedModel:
    """A causal language model of transformers, made by `load`."""

    def __init__(self, causal: Any, device: torch.device) -> None:
        self.causal = causal
        self._device = device

    @classmethod
    def load(cls, directory: Path, device: str = "auto") -> "ExportedModel":
        """The model in `directory`, in float32. Raises ConfigError if there is none, or if a part of it is missing;
        LocalError if it does not fit in memory."""
        from transformers import AutoConfig, AutoModelForCausalLM

        chosen = pick_device(device)
        set_threads(None)
        if not directory.is_dir():  # transformers would take it for a name on the hub
            raise ConfigError(f"{directory}: there is no such directory")
        try:
            config = AutoConfig.from_pretrained(directory, **_LOCAL)
            model_family.check_split(config, 1)
            causal, info = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=torch.float32,
                attn_implementation=model_family.attention(config),
                output_loading_info=True,
                use_safetensors=True,  # never a pickle
                **_LOCAL,
            )
        except (OSError, MemoryError, SafetensorError, *model_family.FOREIGN_ERRORS) as error:
            if isinstance(as_local(error), LocalError):
                raise LocalError(f"{directory}: not enough memory to load the model on {chosen}: free some") from error
            reason = model_family.one_line(error)
            raise ConfigError(f"{directory} contains no model that can be loaded: {reason}") from error
        if missing := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
            raise ConfigError(f"{directory}: the weights do not fit config.json ({', '.join(missing[:3])})")
        return cls(causal.to(chosen).eval(), chosen)

    def logits(self, batch: Batch) -> Tensor:
        """Logits B×T×V in float32."""
        mask = {} if batch.mask is None else {"attention_mask": self._tensor(host_tensor.to_torch(batch.mask)).bool()}
        tokens_BT = self._tensor(host_tensor.to_torch(batch.inputs)).long()
        logits_BTV: Tensor = self.causal(input_ids=tokens_BT, use_cache=False, **mask).logits
        return logits_BTV.float()

    def nats(self, batch: Batch) -> tuple[Tensor, int]:
        """Cross entropy summed over those of the B×T targets that count, with its graph, and their number."""
        targets_BT = self._tensor(host_tensor.to_torch(batch.targets)).long()
        loss = torch.nn.functional.cross_entropy(
            self.logits(batch).flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return loss, int((targets_BT != IGNORED).sum())

    @torch.no_grad()
    def loss(self, batch: Batch) -> LossSum:
        """As `nats`, but as plain numbers."""
        loss, tokens = self.nats(batch)
        return LossSum(float(loss), tokens)

    def continuation(self, prompt: Sequence[int], window: int, temperature: float, seed: int) -> Iterator[int]:
        """Token ids that follow `prompt` (at least one id), one at a time, without end.

        The context has at most `window` ids; when it is full, its later half is read again and the cache starts over.
        `temperature` 0 always takes the likeliest id; otherwise `seed` determines the draws. Raises LocalError if the
        model's output is not finite.
        """
        generator = torch.Generator().manual_seed(seed)
        known = inspect.signature(self.causal.forward).parameters
        cache = next((name for name in CACHES if name in known), CACHES[-1])
        seen, past, fresh = list(prompt[-window:]), None, list(prompt[-window:])
        while True:
            if len(seen) > window:
                seen = seen[-max(1, window // 2) :]
                past, fresh = None, seen
            with torch.no_grad():
                output = self.causal(input_ids=self._tensor(torch.tensor([fresh])), use_cache=True, **{cache: past})
            logits_V = output.logits[0, -1].float().cpu()
            if not bool(torch.isfinite(logits_V).all()):
                raise LocalError("the model's output is not finite: its weights are broken")
            chosen = int(_drawn(logits_V, temperature, generator))
            past, fresh = getattr(output, cache), [chosen]
            seen.append(chosen)
            yield chosen

    def _tensor(self, values: Tensor) -> Tensor:
        return values.to(self._device)


def load_decoder(directory: Path) -> Callable[[Sequence[int]], str]:
    """A function from token ids to text without special tokens, which uses the tokenizer in `directory`.

    It leaves out ids beyond those of the tokenizer. Raises ConfigError if the tokenizer cannot be loaded.
    """
    tokenizer = tokenizer_in(directory)
    known = len(tokenizer)
    return lambda ids: str(tokenizer.decode([one for one in ids if one < known], skip_special_tokens=True))


def chat_ids(directory: Path, message: str) -> list[int]:
    """A user's message in the chat template of the tokenizer in `directory`, up to where the answer starts.

    Raises ConfigError if there is no template, or if it rejects the message.
    """
    from jinja2 import TemplateError

    tokenizer, said = tokenizer_in(directory), [{"role": "user", "content": message}]
    if not tokenizer.chat_template:
        raise ConfigError(f"{directory}: the tokenizer has no chat template; leave out --chat")
    try:
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    except (TemplateError, *model_family.FOREIGN_ERRORS) as error:
        raise ConfigError(f"{directory}: the chat template fails: {model_family.one_line(error)}") from error
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def tokenizer_in(directory: Path) -> Any:
    """The tokenizer of an exported directory. Raises ConfigError if it cannot be loaded."""
    try:
        return stored_tokenizer(directory, local=True)
    except (OSError, *model_family.FOREIGN_ERRORS) as error:
        reason = model_family.one_line(error)
        raise ConfigError(f"{directory} contains no tokenizer that can be loaded: {reason}") from error


def _drawn(logits_V: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits_V.argmax()
    # Relative to the largest, and in float64: float32 overflows at a temperature near 0.
    scaled_V = (logits_V - logits_V.max()).double() / temperature
    return torch.multinomial(torch.softmax(scaled_V.float(), dim=-1), 1, generator=generator)[0]
