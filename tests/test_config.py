"""What the configuration accepts beyond its types."""

import pytest
import yaml

from lolcats.config import LinearizeConfig, parse_override, set_fields
from lolcats.errors import UserError


@pytest.mark.parametrize("field", ["fused_kernels", "cuda_graphs"])
@pytest.mark.parametrize("stage", ["transfer", "adjust"])
def test_switches(stage, field):
    """A bare `off` is false in YAML."""
    assert getattr(getattr(LinearizeConfig(), stage), field) == "auto"
    for text, expected in (("off", "off"), ('"off"', "off"), ("auto", "auto"), ("on", "auto")):
        config = LinearizeConfig.from_dict(set_fields({}, dict([parse_override(f"{stage}.{field}={text}")])))
        assert getattr(getattr(config, stage), field) == expected
        assert LinearizeConfig.from_dict(yaml.safe_load(config.to_yaml())) == config
    with pytest.raises(UserError, match=f"{stage}.{field}"):
        LinearizeConfig.from_dict({stage: {field: "sometimes"}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"adjust": {"softmax_control": True, "distill_factor": 1.0}}, "the control is its own teacher"),
        ({"adjust": {"feature_lr": 1e-3}}, "feature_lr=0.001 with train_feature_maps=false: change that"),
        ({"data": {"sources": [{"path": "demo", "loss_on": "prompt"}]}}, "data.sources.0.loss_on"),
        ({"gates": {"enabled": False}}, "gates: enabled"),
        ({"gates": {"epochs": 3}}, "gates: epochs"),
    ],
)
def test_settings_that_do_not_go_together(values, message):
    with pytest.raises(UserError, match=message):
        LinearizeConfig.from_dict(values)


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ({"linear_length_cap": "auto"}, 96),
        ({"linear_length_cap": "auto", "window_size": 0, "sinks": 1}, 96),
        ({"linear_length_cap": "auto", "window_size": 0}, 0),
        ({"linear_length_cap": "auto", "feature_map": None}, 0),
        ({"linear_length_cap": 50}, 50),
        ({}, 0),
    ],
)
def test_an_automatic_length_cap_is_the_training_length(attention, expected):
    config = LinearizeConfig.from_dict({"attention": attention, "data": {"sequence_length": 96}})
    assert config.attention.linear_length_cap == expected
    assert LinearizeConfig.from_dict(yaml.safe_load(config.to_yaml())) == config
    assert LinearizeConfig().attention.linear_length_cap == 0  # sections are not shared
    own = LinearizeConfig.from_dict({"attention": attention, "transfer": {"data": {"sequence_length": 96}}})
    assert own.attention.linear_length_cap == expected
    inherited = {"data": {"sequence_length": 96}, "transfer": {"data": {"validation_rows": 9}}}
    assert LinearizeConfig.from_dict({"attention": attention} | inherited).attention.linear_length_cap == expected


@pytest.mark.parametrize("stage", ["transfer", "adjust"])
def test_a_stages_data_are_those_of_the_run_but_for_what_it_says(stage):
    own = [{"path": "a", "weight": 3.0}, {"path": "b"}]
    mixture = [{"path": "data.sources", "weight": 0.5}, {"path": "demo", "weight": 0.5, "loss_on": "all"}]
    values = {
        "data": {"sources": own, "begin_token": True, "sequence_length": 64},
        stage: {"data": {"sources": mixture, "sequence_length": 256}},
    }
    config = LinearizeConfig.from_dict(values)
    found = config.data_of(stage)
    assert [(source.path, source.weight) for source in found.sources] == [("a", 0.375), ("b", 0.125), ("demo", 0.5)]
    assert (found.sequence_length, found.begin_token) == (256, True)
    assert LinearizeConfig.from_dict(config.model_dump(mode="json")) == config
    assert config.data_of({"transfer": "adjust", "adjust": "transfer"}[stage]) == config.data
    values[stage]["data"] = {"sequence_length": 128}
    longer = LinearizeConfig.from_dict(values).data_of(stage)
    assert longer == config.data.model_copy(update={"sequence_length": 128})


def test_no_stage_trains_on_what_the_result_is_measured_on():
    data = {"sources": [{"path": "a"}], "validation_rows": 200}
    mixture = [{"path": "data.sources"}, {"path": "demo", "validation_rows": 20}]
    config = LinearizeConfig.from_dict({"data": data, "adjust": {"data": {"sources": mixture}}})
    assert [config.data_of("adjust").held_out(source) for source in config.data_of("adjust").sources] == [200, 20]
    for own in ({"validation_rows": 50}, {"sources": [{"path": "a", "validation_rows": 50}]}):
        transfer = LinearizeConfig.from_dict({"data": data, "transfer": {"data": own}}).data_of("transfer")
        assert transfer.held_out(transfer.sources[0]) == 200


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"transfer": {"micro_bach_size": 3}}, r"transfer.micro_bach_size: .* did you mean transfer.micro_batch_size"),
        ({"data": {"sources": [{"path": "x", "wieght": 2}]}}, r"data.sources.0.wieght: .* mean data.sources.weight"),
        ({"atention": {}}, "atention: there is no such field; did you mean attention"),
        ({"window_size": 3}, "window_size: .* did you mean attention.window_size"),  # of another section
        ({"output": {"zzz": 1}}, "expected one of track"),
        ({"attention": {"windw": 3, "linear_length_cap": "auto"}}, "did you mean attention.window"),
    ],
)
def test_misspelt_fields_are_told_their_nearest_name(values, message):
    with pytest.raises(UserError, match=message) as caught:
        LinearizeConfig.from_dict(values)
    assert "Extra inputs" not in str(caught.value)
