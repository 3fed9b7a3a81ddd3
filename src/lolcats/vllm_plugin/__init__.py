"""Plugin for vLLM: serves linearized folders. vLLM finds it through the entry point `vllm.general_plugins`.

This module imports nothing heavy, since vLLM calls `register` in each of its processes, and again in the same one.
"""

from __future__ import annotations

import logging

ARCHITECTURE = "LolcatsForCausalLM"


def register() -> None:
    """Tell vLLM the architecture, its settings and kind of state, and the operator at which it cuts compiled graphs.

    A release of vLLM whose interfaces differ serves other models as before; a warning says so.
    """
    try:
        _register()
    except Exception as error:
        message = (
            "linearized models cannot be served by this release of vLLM (%s: %s); lolcats[vllm] names those tested"
        )
        logging.getLogger("vllm.lolcats").warning(message, type(error).__name__, error)


def _register() -> None:
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    import lolcats.modeling  # noqa: F401  # the configuration's model type
    from lolcats.vllm_plugin.defaults import LolcatsDefaults

    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:{ARCHITECTURE}")
    MODELS_CONFIG_MAP[ARCHITECTURE] = LolcatsDefaults
    if "LOLCATS" not in MambaAttentionBackendEnum.__members__:  # CUSTOM is one for all plugins
        MambaAttentionBackendEnum.register("LOLCATS", f"{__name__}.backend.HybridBackend")
    if "vllm::lolcats_attention" not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append("vllm::lolcats_attention")
