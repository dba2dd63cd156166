"""An exported model, loaded by plain transformers in float32: its loss, and text that it generates.

Shape legend: B microbatch, T sequence, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor, model_family
from noloco_p2p.compute.hardware import pick_device
from noloco_p2p.compute.stage import IGNORED
from noloco_p2p.core.messages import Batch, LossSum
from noloco_p2p.errors import ConfigError


class ExportedModel:
    """A causal language model of transformers. See `load`."""

    def __init__(self, causal: Any, device: torch.device) -> None:
        self._causal = causal
        self._device = device

    @classmethod
    def load(cls, directory: Path, device: str = "auto") -> "ExportedModel":
        """The model in `directory`, in float32. Raises ConfigError when there is none or a part of it is missing."""
        from safetensors import SafetensorError
        from transformers import AutoConfig, AutoModelForCausalLM

        chosen = pick_device(device)
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            causal, info = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=torch.float32,
                attn_implementation=model_family.attention(config),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, SafetensorError, *model_family.FOREIGN_ERRORS) as error:
            raise ConfigError(
                f"{directory} holds no model that can be loaded: {model_family.one_line(error)}"
            ) from error
        missing = sorted({*info["missing_keys"], *info["unexpected_keys"]})
        if missing:
            raise ConfigError(f"{directory}: the weights do not fit config.json ({', '.join(missing[:3])})")
        return cls(causal.to(chosen).eval(), chosen)

    @torch.no_grad()
    def loss(self, batch: Batch) -> LossSum:
        """Cross entropy summed over the targets of B×T tokens that count, in nats."""
        targets_BT = self._tensor(host_tensor.to_torch(batch.targets)).long()
        mask = {} if batch.mask is None else {"attention_mask": self._tensor(host_tensor.to_torch(batch.mask)).bool()}
        tokens_BT = self._tensor(host_tensor.to_torch(batch.inputs)).long()
        logits_BTV = self._causal(input_ids=tokens_BT, use_cache=False, **mask).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.float().flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return LossSum(float(loss), int((targets_BT != IGNORED).sum()))

    def continuation(self, prompt: Sequence[int], window: int, temperature: float, seed: int) -> Iterator[int]:
        """Token ids that follow `prompt` (at least one id), one after the other, endlessly.

        The context is at most `window` ids; when it is full, its later half is read again and the cache starts over.
        `temperature` 0 takes the likeliest id every time; otherwise the draws follow from `seed`.
        """
        generator = torch.Generator().manual_seed(seed)
        seen, past, fresh = list(prompt[-window:]), None, list(prompt[-window:])
        while True:
            if len(seen) > window:
                seen = seen[-max(1, window // 2) :]
                past, fresh = None, seen
            with torch.no_grad():
                output = self._causal(
                    input_ids=self._tensor(torch.tensor([fresh])), past_key_values=past, use_cache=True
                )
            logits_V = output.logits[0, -1].float().cpu()
            chosen = int(_drawn(logits_V, temperature, generator))
            past, fresh = output.past_key_values, [chosen]
            seen.append(chosen)
            yield chosen

    def _tensor(self, values: Tensor) -> Tensor:
        return values.to(self._device)


def load_decoder(directory: Path) -> Callable[[Sequence[int]], str]:
    """Token ids → text, without special tokens, by the tokenizer in `directory`. Raises ConfigError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, *model_family.FOREIGN_ERRORS) as error:
        raise ConfigError(
            f"{directory} holds no tokenizer that can be loaded: {model_family.one_line(error)}"
        ) from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


def _drawn(logits_V: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits_V.argmax()
    return torch.multinomial(torch.softmax(logits_V / temperature, dim=-1), 1, generator=generator)[0]
