"""What the configuration accepts beyond its types."""

from __future__ import annotations

import pytest
import yaml

from lolcats.config import LinearizeConfig
from lolcats.config import merge
from lolcats.config import parse_override
from lolcats.errors import UserError


@pytest.mark.parametrize("field", ["fused_kernels", "cuda_graphs"])
@pytest.mark.parametrize("stage", ["transfer", "adjust"])
def test_switches(stage, field):
    """A bare `off` is false in YAML."""
    assert getattr(getattr(LinearizeConfig(), stage), field) == "auto"
    for text, expected in (("off", "off"), ('"off"', "off"), ("auto", "auto"), ("on", "auto")):
        config = LinearizeConfig.from_dict(merge({}, parse_override(f"{stage}.{field}={text}")))
        assert getattr(getattr(config, stage), field) == expected
        assert LinearizeConfig.from_dict(yaml.safe_load(config.to_yaml())) == config
    with pytest.raises(UserError, match=f"{stage}.{field}"):
        LinearizeConfig.from_dict({stage: {field: "sometimes"}})
