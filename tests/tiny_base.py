"""A base model for scripts that have no test fixtures."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lolcats.data.retrieval import haystack_text

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"


def write_base(folder: Path) -> None:
    """A random Llama of two layers, which knows some words of the package's texts."""
    words = sorted(set(haystack_text("demo", "train")[:20_000].split()))
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<eos>", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
