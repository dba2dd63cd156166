"""The part of a causal language model that one stage holds, cut out of a model class of transformers.

The model's own forward still handles masks, rotary angles and layer types. What a stage does not own is replaced by
modules that pass their input through; what it owns keeps the model's global names, so that the union of the stages'
parameters is the complete checkpoint. Semi-private parts of transformers are used here and nowhere else.

Shape legend: B microbatch, T sequence, D hidden size, V vocabulary.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from noloco_p2p.compute import model_family
from noloco_p2p.errors import ConfigError

INPUT_MODULES = frozenset({"project_in", "word_embeddings_layernorm", "embed_norm"})
"""Modules next to the layers, other than embeddings, that process stage 0's input; all others belong to the output."""


Replacement = tuple[nn.Module, str, nn.Module]
"""A child that another stage holds: its parent, its name there, and its replacement."""


class PassthroughLayer(nn.Module):
    """Replaces a layer, norm or projection of another stage. Keeps its string attributes: some decoders choose a mask
    by the type of a layer."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if isinstance(value, str):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Returns its first argument."""
        return hidden_states


class ZeroPositions(nn.Module):
    """Replaces the learned positions, which stage 0 has already added."""

    def forward(self, positions: Tensor, *_: object, **__: object) -> Tensor:
        """Returns a zero without dimensions."""
        return positions.new_zeros(())


@dataclass(frozen=True)
class StageModule:
    """One stage's part of the model; call it to run the forward pass."""

    causal: Any
    """The causal language model, with pass-through modules in place of what other stages hold."""
    index: int
    stages: int
    hidden_size: int
    vocabulary: int
    parameters: dict[str, nn.Parameter]
    """By global name, in the model's order."""
    counts: tuple[int, ...]
    """Number of parameters of each stage of the run."""

    @cached_property
    def _decoder(self) -> Any:
        return _decoder_and_layers(self.causal)[0]

    def layer_matrices(self) -> frozenset[str]:
        """Names of the two-dimensional parameters of the layers, except those of embeddings.

        Raises ConfigError if the layers cannot be told from the rest.
        """
        _, layers = _decoder_and_layers(self.causal)
        inner = [module for module in layers.modules() if not isinstance(module, nn.Embedding)]
        found = {parameter for module in inner for parameter in module.parameters(recurse=False) if parameter.ndim == 2}
        return frozenset(name for name, parameter in self.parameters.items() if parameter in found)

    def any_inputs(self, shape_BT: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Random tokens at stage 0, else hidden states of unit variance; the same ones at every call."""
        draw = torch.Generator().manual_seed(self.index)
        if self.index == 0:
            return torch.randint(self.vocabulary, shape_BT, generator=draw)
        return torch.randn((*shape_BT, self.hidden_size), generator=draw, dtype=dtype)

    def __call__(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        """Logits B×T×V at the last stage, else hidden states B×T×D. `inputs` is B×T tokens at stage 0, else B×T×D."""
        arguments = {"input_ids" if self.index == 0 else "inputs_embeds": inputs, "use_cache": False}
        if mask is not None:
            arguments["attention_mask"] = mask
        if self.index == self.stages - 1:
            logits: Tensor = self.causal(**arguments).logits
            return logits
        hidden: Tensor = self._decoder(**arguments).last_hidden_state
        return hidden


def make_stage_module(config: Any, index: int, stages: int, *, seed: int, dtype: torch.dtype) -> StageModule:
    """Stage `index` of `stages` with its initial weights, in host memory, in `dtype`.

    Each tensor depends only on the seed and its global name, not on the split. Raises ConfigError if the structure of
    the model is not understood.
    """
    part = meta_stage_module(config, index, stages, dtype=dtype)
    part.causal._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    _initialise(part.causal, seed)
    return _with_parameters(part.causal, index, part.counts)


class _RangesOnHost(TorchFunctionMode):
    """Makes ranges on the host, and vectors of zeros, with which they are joined; everything else stays where it is.

    Rotary frequencies are computed from them. On the meta device torch would import sympy for that: 34 MiB.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function's own result."""
        vector = func is torch.zeros and [type(size) for size in args] == [int]
        on_host = {"device": "cpu"} if vector or func is torch.arange else {}
        return func(*args, **(kwargs or {}) | on_host)


def meta_stage_module(config: Any, index: int, stages: int, *, dtype: torch.dtype) -> StageModule:
    """The module without memory: all but some vectors is on the meta device. Raises as `make_stage_module` does."""
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"), no_init_weights(), _RangesOnHost():
            causal = model_family.model_class(config)._from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation=model_family.attention(config)
            )
    except model_family.FOREIGN_ERRORS as error:
        raise ConfigError(f"model: {config.model_type} cannot be built: {model_family.one_line(error)}") from error
    causal.requires_grad_(True)  # Some families freeze biases of their routers (ernie4_5_moe), which get no gradient.
    _tie(causal)
    all_foreign = [_foreign(causal, config, other, stages) if stages > 1 else [] for other in range(stages)]
    counts = tuple(_count_without(causal, foreign) for foreign in all_foreign)
    for parent, name, stand_in in all_foreign[index]:
        setattr(parent, name, stand_in)
    decoder: Any = _decoder_and_layers(causal)[0] if index > 0 else None
    if hasattr(decoder, "embedding_multiplier"):
        decoder.embedding_multiplier = 1.0  # Granite's decoder scales any input, which stage 0 has done.
    return _with_parameters(causal, index, counts)


def _with_parameters(causal: Any, index: int, counts: tuple[int, ...]) -> StageModule:
    config, parameters = causal.config, dict(causal.named_parameters())
    return StageModule(causal, index, len(counts), config.hidden_size, config.vocab_size, parameters, counts)


def _count_without(causal: Any, foreign: list[Replacement]) -> int:
    """Number of the model's parameters, each counted once, except those of the replaced children."""
    away = {parameter for parent, name, _ in foreign for parameter in getattr(parent, name).parameters()}
    return sum(parameter.numel() for parameter in causal.parameters() if parameter not in away)


def _foreign(causal: Any, config: Any, index: int, stages: int) -> list[Replacement]:
    """The children that stage `index` does not own, and their replacements. Raises ConfigError if there is no split."""
    names = {module: name for name, module in causal.named_modules()}
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    if embedding not in names or head not in names or head is embedding:
        raise ConfigError(f"model: {config.model_type} has no separate embedding and head; it cannot be split")
    decoder, layers = _decoder_and_layers(causal)
    first, last = index == 0, index == stages - 1
    mine = model_family.layer_ranges(config.num_hidden_layers, stages)[index]
    others = [number for number in range(config.num_hidden_layers) if number not in mine]
    found: list[Replacement] = [(layers, str(number), PassthroughLayer(layers[number])) for number in others]
    stand_in: nn.Module
    for name, module in list(decoder.named_children()):
        if module is layers or not ("norm" in name or any(True for _ in module.parameters())):
            continue
        if module is embedding or name in INPUT_MODULES:
            owned, stand_in = first, PassthroughLayer(module)
        elif isinstance(module, nn.Embedding):
            owned, stand_in = first, ZeroPositions()
        else:
            owned, stand_in = last, PassthroughLayer(module)
        if not owned:
            found.append((decoder, name, stand_in))
    if not last:
        path, _, name = names[head].rpartition(".")
        found.append((causal.get_submodule(path), name, PassthroughLayer(head)))
    return found


def _decoder_and_layers(causal: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The module that holds the embedding, and its list of layers. Raises ConfigError if there is no such list."""
    names = {module: name for name, module in causal.named_modules()}
    embedding = causal.get_input_embeddings()
    decoder = causal.get_submodule(names[embedding].rpartition(".")[0]) if embedding in names else None
    children = () if decoder is None else decoder.children()
    stacks = [m for m in children if isinstance(m, nn.ModuleList) and len(m) == causal.config.num_hidden_layers]
    if decoder is None or len(stacks) != 1:
        raise ConfigError(f"model: the layers of {causal.config.model_type} are not one list next to its embedding")
    return decoder, stacks[0]


def _initialise(causal: Any, seed: int) -> None:
    """Set the family's own initial weights, each module with a generator seeded by its global name.

    Everything is set to NaN first, which reveals a tensor that no rule of the family fills. A parent may fill a tensor
    again (gpt2 scales the projections of its residual paths), hence post-order.
    """
    tensors = dict(causal.named_parameters())
    buffers = dict(causal.named_buffers())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for tensor in (*tensors.values(), *buffers.values()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
            tensor._is_hf_initialized = False
        for name, module, owner in _post_order(causal, "", causal):
            torch.default_generator.manual_seed(crc32(f"{seed}:{name}".encode()))  # only the CPU's generator
            owner._init_weights(module)
    _tie(causal)
    for name, tensor in (*causal.named_parameters(), *causal.named_buffers()):
        filled = torch.isfinite(tensor).all() if tensor.is_floating_point() else (tensor >= 0).all()
        if not filled:
            raise ConfigError(f"model: {causal.config.model_type} has no initial values for {name}")


def _tie(causal: Any) -> None:
    """Make tied weights one parameter. They come apart when their memory is allocated."""
    if getattr(causal.config, "tie_word_embeddings", False):
        causal.tie_weights()


def _post_order(module: nn.Module, name: str, owner: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """(global name, module, the model class that knows how to fill it), children before their parent."""
    owner = module if hasattr(module, "_init_weights") else owner
    for child_name, child in module.named_children():
        yield from _post_order(child, f"{name}.{child_name}" if name else child_name, owner)
    yield name, module, owner
