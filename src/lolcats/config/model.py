"""The pretrained model."""

from __future__ import annotations

from typing import Literal

from lolcats.config.section import Section


class ModelSection(Section):
    """The pretrained model to linearize."""

    path: str | None = None
    """Hugging Face hub id or local folder."""
    revision: str | None = None
    """Branch, tag or commit of the hub repository."""
    gguf_file: str | None = None
    """Name of a GGUF file in `path`; its weights are dequantised while loading."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the frozen weights and activations; auto: bfloat16 on a GPU, float32 on a CPU.
    Feature maps, window factors and states are always float32."""
    device: str = "auto"
    """auto (first GPU, else CPU), cpu, cuda, cuda:1, ..."""
    load_in_4bit: bool = False
    """Keep the frozen weights in 4 bits (NF4, bitsandbytes): a quarter of the memory, a little less exact. The
    exported model has the checkpoint's own weights, with the trained parts."""
    trust_remote_code: bool = False
    """Run Python code shipped with the checkpoint."""
