"""Writes tokenizers of a few words, in the files that `AutoTokenizer` reads."""

from pathlib import Path


def save_tokenizer(folder: Path, words: dict[str, int], eos: str | None = "<eos>") -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab=words, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)
    made.add_special_tokens({"additional_special_tokens": ["<spare>"]})
    made.save_pretrained(folder)
    return str(folder)
