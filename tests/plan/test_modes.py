"""Modes, their best block sizes, what is missing, and the recommended command."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
import yaml
from transformers import AutoConfig
from typer.testing import CliRunner

from lolcats.cli.app import app
from lolcats.config import AdjustSection, AttentionSection, LinearizeConfig
from lolcats.errors import UserError
from lolcats.plan import blockwise, work
from lolcats.plan.gpus import GB, GPUS, find_gpu
from lolcats.plan.modes import MODES, all_modes
from lolcats.plan.recommend import recommend
from lolcats.plan.request import Request
from lolcats.plan.shape import model_shape, shape_of
from lolcats.plan.tables import as_json
from lolcats.plan.throughput import measured, rate

H100 = Request(find_gpu("h100"), tokens=20 * 10**6)


@pytest.fixture(scope="module")
def large():
    return model_shape("llama3-405b", AttentionSection(share_state="query_head"), AdjustSection())


@pytest.fixture(scope="module")
def small():
    return model_shape("smollm2-135m", AttentionSection(), AdjustSection())


def by_name(plans):
    return {(plan.mode, *plan.options): plan for plan in plans}


def test_the_papers_405b_blocks_fit_one_gpu(large):
    request = replace(H100, block_layers=9, micro_batch_size=1)
    plan = blockwise.jobs(large, request)
    assert plan.missing is None
    assert (plan.block_layers, plan.blocks) == (9, 14)
    # 2 T d for each of the 13 boundaries, up to the part of a sequence that packing drops; the paper counts 14.
    assert plan.disk == pytest.approx(13 * 2 * 20e6 * 16384, rel=1e-3)
    assert 60 * GB < plan.needed < 80 * GB


def test_disk_by_mode(large):
    streaming, jobs = (mode(large, replace(H100, block_layers=9)) for mode in (blockwise.streaming, blockwise.jobs))
    assert jobs.disk == pytest.approx(13 / 2 * streaming.disk)
    assert [blockwise.activation_caches_at_once(blocks, streaming=True) for blocks in (1, 2, 3, 9)] == [0, 1, 2, 2]
    assert [blockwise.activation_caches_at_once(blocks, streaming=False) for blocks in (1, 2, 3, 9)] == [0, 1, 2, 8]


def test_the_best_block_is_the_largest_that_fits(large):
    chosen = blockwise.streaming(large, H100)
    assert chosen.missing is None
    next_larger = min(size for size in blockwise._block_sizes(126) if size > chosen.block_layers)
    larger = blockwise.streaming(large, replace(H100, block_layers=next_larger))
    assert larger.missing is not None
    assert f"--block-layers {chosen.block_layers}" in larger.missing


def test_jobs_trade_block_size_for_disk(large):
    plan = blockwise.jobs(large, replace(H100, gpus=14))
    wanted = blockwise.jobs(large, replace(H100, gpus=14, disk_gb=plan.disk / GB - 1))
    assert wanted.missing is not None or wanted.disk < plan.disk
    missing = blockwise.jobs(large, replace(H100, gpus=14, disk_gb=100)).missing
    assert missing is not None
    assert "of disk, has 100 GB" in missing


def test_blocks_together_do_the_joint_work(small):
    """Except that a block whose output is wanted runs to its end; the last one stops as joint training does."""
    blocks = blockwise.split(small, 10)
    assert [len(block) for block in blocks] == [10, 10, 10]
    parts = [work.transfer(block, 1024, small.mean_window, to_the_end=block is not blocks[-1]) for block in blocks]
    assert sum(parts) == pytest.approx(work.transfer(small.layers, 1024, small.mean_window))


def test_softmax_layers_are_in_blocks_and_not_trained():
    shape = model_shape("smollm2-135m", AttentionSection(keep_softmax=[0, 1, 29]), AdjustSection())
    blocks = blockwise.split(shape, 9)
    assert [len(block) for block in blocks] == [11, 9, 9]  # layer 29 is behind everything that trains
    assert [sum(layer.linear for layer in block) for block in blocks] == [9, 9, 9]
    assert shape.layers[0].feature_parameters == 0
    assert not shape.layers[0].adapted


def test_native_windows_stay_and_train_nothing():
    """As in Gemma 3: most layers have a sliding window, which `auto` leaves as they are."""
    config = AutoConfig.for_model(
        "gemma3_text",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        sliding_window=16,
        layer_types=["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
    )
    kept, all_linear = (
        shape_of(config, AttentionSection(sliding_layers=sliding), AdjustSection()) for sliding in ("auto", "linearize")
    )
    assert (kept.linear_layers, len(all_linear.linear_layers)) == ((2, 5), 6)
    assert 3 * kept.feature_parameters == all_linear.feature_parameters
    assert 3 * kept.lora_parameters(8) == all_linear.lora_parameters(8)
    assert [layer.sliding_window for layer in kept.layers] == [16, 16, None, 16, 16, None]
    plans = [by_name(all_modes(shape, H100)) for shape in (kept, all_linear)]
    for mode in ("joint", "lora"):
        few, many = (found[(mode,)] for found in plans)
        assert few.trained * 3 == many.trained
        assert few.seconds < many.seconds
        assert few.memory.optimizer * 3 == many.memory.optimizer


def stage_2(shape, **options):
    request = replace(H100, gpu=find_gpu("h200"), micro_batch_size=8, adjust=AdjustSection(**options))
    return by_name(all_modes(shape, request))[("lora",)]


def test_what_stage_2_compares_with_costs_time(small):
    """Measured on this model, whole runs with evaluations: 82 s where the plain stage takes 50
    (docs/what-we-learned.md)."""
    plain, divergence = (stage_2(small, **options) for options in ({}, {"distill_factor": 0.5}))
    assert divergence.seconds / plain.seconds == pytest.approx(82 / 50, rel=0.1)
    assert divergence.trained == plain.trained


def test_what_stage_2_compares_with_takes_memory(small):
    """Measured in the same runs: peaks of 3.89 GiB plain, 5.84 with KL."""
    plain, divergence = (stage_2(small, **o).memory.total / 2**30 for o in ({}, {"distill_factor": 0.5}))
    assert divergence - plain == pytest.approx(5.84 - 3.89, rel=0.15)


def test_feature_maps_trained_in_stage_2_are_counted(small):
    plain, trained = (stage_2(small, train_feature_maps=on) for on in (False, True))
    assert trained.trained - plain.trained == small.feature_parameters
    assert trained.seconds > plain.seconds


def test_shards_are_gathered_once_more_for_a_teacher(large):
    request = replace(H100, gpus=16, batch_size=16, gpus_per_node=16)
    plain, taught = (
        by_name(all_modes(large, replace(request, adjust=adjust)))[("lora-sharded", "gradient checkpointing")]
        for adjust in (AdjustSection(), AdjustSection(distill_factor=0.5))
    )
    compute = [plan.flops / plan.gpus / plan.rate.tflop_s / 1e12 for plan in (plain, taught)]
    gathering = plain.seconds - compute[0]
    assert taught.seconds - compute[1] == pytest.approx(1.5 * gathering, rel=0.1)  # the teacher's own rate is higher


def test_settings_are_in_the_commands(small, large):
    settings = ("attention.keep_softmax=[0, 1]", "adjust.distill_factor=0.5")
    request = replace(H100, settings=settings)
    advice = recommend("m", all_modes(small, request), request)
    assert advice is not None
    assert shlex.split(advice.commands[0])[-4:] == ["--set", settings[0], "--set", settings[1]]
    request = replace(request, gpus=14, block_layers=9)
    advice = recommend("m", [blockwise.jobs(large, request)], request)
    assert advice is not None
    assert settings[0] in advice.commands[0]
    assert settings[1] not in advice.commands[0]  # stage 2 is no part of it


def test_pipeline_needs_a_block_for_every_gpu(small):
    plan = blockwise.pipelined(small, replace(H100, gpus=8))
    assert (plan.block_layers, plan.missing) == (4, None)
    short = blockwise.pipelined(small, replace(H100, gpus=8, block_layers=10))
    assert short.missing is not None
    assert "--block-layers 4" in short.missing


def test_too_large_blocks_are_an_error(small):
    with pytest.raises(UserError, match="30 layers to linearize"):
        blockwise.streaming(small, replace(H100, block_layers=31))


def test_what_does_not_fit_says_what_would(large):
    plans = by_name(all_modes(large, H100))
    text = plans[("joint",)].missing
    assert text is not None
    assert "needs 818 GB on a GPU with 80 GB" in text
    assert "--mode streaming --block-layers 11" in text
    assert "--gpus 16 --batch-size 16" in text
    again = by_name(all_modes(large, replace(H100, gpus=16, batch_size=16)))
    assert again[("sharded",)].missing is None


def test_batches_that_do_not_divide(small):
    plans = by_name(all_modes(small, replace(H100, gpus=3)))
    assert "use --batch-size 3" in (plans[("sharded",)].missing or "")


def test_more_gpus_mean_less_memory_and_less_time(large):
    eight, sixteen = (
        by_name(all_modes(large, replace(H100, gpus=gpus, batch_size=16, gpus_per_node=16)))[("sharded",)]
        for gpus in (8, 16)
    )
    assert sixteen.memory.weights == eight.memory.weights / 2
    assert sixteen.seconds < eight.seconds


def test_every_mode_is_planned_and_known(small):
    assert {plan.mode for plan in all_modes(small, replace(H100, gpus=2))} == set(MODES)
    assert {plan.mode for plan in all_modes(small, H100)} == {"joint", "streaming", "jobs", "lora"}


def test_recommended_commands(small, large):
    request = replace(H100, batch_size=8)
    one = recommend("a model", all_modes(small, request), request)
    assert one is not None
    assert one.commands == (
        "lolcats linearize 'a model' --data DATA --max-tokens 20000000 --epochs 1 --sequence-length 1024"
        " --batch-size 8 -o out/ --micro-batch-size 8 --lora-rank 8",
    )
    assert one.hours == sum(plan.hours for plan in one.plans)
    many = replace(H100, gpus=24, batch_size=24)
    nodes = recommend("m", all_modes(large, many), many)
    assert nodes is not None
    assert nodes.commands[0].startswith("torchrun --nnodes 3 --nproc-per-node 8")
    alone = recommend("m", all_modes(large, H100), H100)
    assert alone is not None
    assert "--block-layers 11 --block-mode streaming" in alone.commands[0]
    assert alone.commands[0].endswith("--no-adjust")


def test_jobs_are_several_commands(large):
    request = replace(H100, gpus=14, block_layers=9)
    advice = recommend("m", [blockwise.jobs(large, request)], request)
    assert advice is not None
    assert [command.split()[2] for command in advice.commands] == ["prepare", "train", "assemble"]
    assert "0 ... 13" in advice.commands[1]


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_command_line_accepts_every_command(small, gpus):
    """Commands of all combinations of plans resolve to a configuration that says what was planned."""
    request = replace(H100, gpus=gpus, micro_batch_size=2, block_layers=10)
    plans = all_modes(small, request)
    first, second = ([plan for plan in plans if plan.stage == stage] for stage in ("transfer", "adjust"))
    seen = set()
    for pair in [*((one, two) for one in first for two in second), *((one,) for one in first)]:
        advice = recommend("m", pair, request)
        if advice is None or any("4-bit" in plan.options for plan in advice.plans):
            continue
        command = next((text for text in advice.commands if "linearize" in text), None)
        if command is None:
            continue
        words = shlex.split(command)
        result = CliRunner().invoke(app, [*words[words.index("linearize") :], "--dry-run"])
        assert result.exit_code == 0, (command, result.output)
        config = LinearizeConfig.from_dict(yaml.safe_load(result.stdout))
        one = advice.plans[0]
        assert config.transfer.micro_batch_size == 2
        assert config.transfer.block_mode == (one.mode if one.block_layers else "joint")
        assert config.transfer.block_layers == one.block_layers
        assert config.adjust.enabled == (len(advice.plans) > 1)
        last = advice.plans[-1].options
        assert config.parallel.cpu_offload == ("cpu offload" in last)
        assert config.adjust.gradient_checkpointing == ("gradient checkpointing" in last)
        assert words[0] == ("lolcats" if advice.plans[-1].gpus == 1 else "torchrun")
        seen.add(one.mode)
    assert seen >= ({"joint", "streaming", "jobs"} if gpus == 1 else {"sharded", "pipelined", "jobs"})


def test_blocks_prepare_has_the_flags_that_are_printed(large):
    request = replace(H100, gpus=14, block_layers=9)
    advice = recommend("m", [blockwise.jobs(large, request)], request)
    assert advice is not None
    result = CliRunner().invoke(app, ["blocks", "prepare", "--help"], env={"COLUMNS": "200"})
    for flag in ("--data", "--block-layers", "--set", "-o"):
        assert f" {flag} " in advice.commands[0]
        assert flag in result.stdout


def test_nothing_fits(small):
    request = replace(H100, memory_gb=0.01)
    assert recommend("m", all_modes(small, request), request) is None


def test_both_stages_share_their_settings(large):
    request = replace(H100, gpus=8)
    advice = recommend("m", all_modes(large, request), request)
    assert advice is not None
    assert [set(plan.options) >= {"cpu offload"} for plan in advice.plans] == [True, True]


def test_requests_are_checked():
    with pytest.raises(UserError, match="choose a divisor"):
        replace(H100, micro_batch_size=3)
    with pytest.raises(UserError, match="less than one sequence"):
        replace(H100, tokens=100)
    with pytest.raises(UserError, match=r"h200, h100.*--gpu-memory"):
        find_gpu("tpu")
    assert find_gpu("NVIDIA H200") is GPUS["h200"]


def test_every_rate_names_its_source():
    for row in measured():
        assert row["source"].startswith("benchmarks/results/")
        assert 0 < row["utilisation"] < 1


def test_rates_between_and_outside_of_what_was_measured():
    rows = tuple(
        {"gpu": "h200", "stage": "transfer", "hidden_size": hidden, "micro_batch": 1, "tokens": 8, "utilisation": used}
        for hidden, used in ((100, 0.2), (10000, 0.6))
    )
    found = {hidden: rate(GPUS["h200"], "transfer", hidden, 8, rows).utilisation for hidden in (10, 1000, 10**5)}
    assert found == {10: 0.2, 1000: pytest.approx(0.4), 10**5: 0.6}
    assert rate(GPUS["h100"], "transfer", 100, 8, rows).scaled
    assert not rate(GPUS["h200"], "transfer", 100, 8, rows).scaled


def test_json_holds_everything(small):
    plans = all_modes(small, H100)
    report = json.loads(json.dumps(as_json(small, H100, plans, recommend("m", plans, H100))))
    assert report["model"]["parameters"] == small.parameters
    assert len(report["plans"]) == len(plans)
    assert report["plans"][0]["needed"] == plans[0].needed
