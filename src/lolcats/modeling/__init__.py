"""The transformers side: attention and mask functions, cache layer, configuration and model.

Importing this package registers the model with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lolcats.modeling.cache import HybridCacheLayer
from lolcats.modeling.configuration import LolcatsConfig
from lolcats.modeling.model import LolcatsForCausalLM, LolcatsModel

__all__ = ["HybridCacheLayer", "LolcatsConfig", "LolcatsForCausalLM"]

AutoConfig.register(LolcatsConfig.model_type, LolcatsConfig, exist_ok=True)
AutoModel.register(LolcatsConfig, LolcatsModel, exist_ok=True)
AutoModelForCausalLM.register(LolcatsConfig, LolcatsForCausalLM, exist_ok=True)
