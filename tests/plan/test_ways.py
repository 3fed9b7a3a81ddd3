"""Modes, their best block sizes, what is missing, and the recommended command."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
import yaml
from transformers import AutoConfig
from typer.testing import CliRunner

from lolcats.cli.app import app
from lolcats.config import AdjustSection, GatesSection, LinearizeConfig
from lolcats.config.attention import AttentionConfig
from lolcats.errors import UserError
from lolcats.plan.gpus import GB, GPUS, confidence, find_gpu, utilisation
from lolcats.plan.shape import shape_of
from lolcats.plan.side_by_side import side_by_side
from lolcats.plan.ways import (
    CHECKPOINTING,
    FOUR_BIT,
    OFFLOAD,
    Request,
    all_ways,
    best_way,
    commands,
    recommend,
)

H100 = Request(find_gpu("h100"), tokens=20 * 10**6)


@pytest.fixture
def large(known_shape):
    return known_shape("llama3-405b")


@pytest.fixture
def small(known_shape):
    return known_shape("smollm2-135m")


def test_the_papers_405b_blocks_fit_one_gpu(large):
    request = replace(H100, block_layers=9, micro_batch_size=1)
    jobs, streaming = (best_way(large, request, mode) for mode in ("jobs", "streaming"))
    assert jobs.missing is None
    assert (jobs.block_layers, jobs.blocks) == (9, 14)
    # 2 T d for each of the 13 boundaries, up to the part of a sequence that packing drops; the paper counts 14.
    assert jobs.disk == pytest.approx(13 * 2 * 20e6 * 16384, rel=1e-3)
    assert jobs.disk == pytest.approx(13 / 2 * streaming.disk)
    assert 60 * GB < jobs.memory.peak < 80 * GB


def test_the_best_block_is_the_largest_that_fits(large):
    best = best_way(large, H100, "streaming")
    assert best.missing is None
    assert best.block_layers is not None
    sizes = [size for size in (9, 10, 11, 12, 13, 14) if size > best.block_layers]
    assert all(best_way(large, replace(H100, block_layers=size), "streaming").missing for size in sizes)
    assert best_way(large, replace(H100, disk_gb=best.disk / 2 / GB), "jobs").missing is not None


def test_native_windows_and_kept_layers_train_nothing():
    config = AutoConfig.for_model(
        "gemma3_text",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=128,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    shape = shape_of(config, AttentionConfig(), AdjustSection())
    assert shape.linear_layers == (1, 3)
    blocks = best_way(shape, replace(H100, block_layers=1), "streaming")
    assert (blocks.blocks, blocks.missing) == (2, None)
    kept = shape_of(config, AttentionConfig(exact=[1]), AdjustSection())
    assert kept.feature_parameters == shape.feature_parameters / 2


def test_the_teacher_of_stage_2_costs_time_and_memory(small):
    plain = best_way(small, H100, "lora")
    compared = best_way(small, replace(H100, adjust=AdjustSection(distill_factor=0.5)), "lora")
    assert 1.3 < compared.seconds / plain.seconds < 2.2  # a whole run took 1.65 times as long (docs/experiments.md)
    assert compared.memory.peak > plain.memory.peak
    maps = best_way(small, replace(H100, adjust=AdjustSection(train_feature_maps=True)), "lora")
    assert maps.trained == plain.trained + small.feature_parameters


def test_sharding_offloading_and_four_bits_need_less_memory(large):
    eight = replace(H100, gpus=8, batch_size=8, micro_batch_size=1)
    sharded, offloaded = (best_way(large, eight, "sharded", options) for options in ((), (OFFLOAD,)))
    four_gpus = best_way(large, replace(eight, gpus=4), "sharded")
    assert offloaded.memory.weights == 0
    assert offloaded.host == 2 * large.parameters
    assert four_gpus.memory.weights == pytest.approx(2 * sharded.memory.weights)
    assert four_gpus.seconds > sharded.seconds
    four_bits, sixteen_bits = (best_way(large, H100, "joint", options) for options in ((FOUR_BIT,), ()))
    assert four_bits.memory.weights < 0.35 * sixteen_bits.memory.weights


def test_what_does_not_fit_says_what_is_missing(large, small):
    assert best_way(large, H100, "joint").missing.startswith("needs 8")
    assert best_way(large, replace(H100, gpus=3), "sharded").missing == (
        "a batch of 8 sequences does not divide into micro-batches of 1 on 3 GPUs; use --batch-size 3"
    )
    assert "GB of disk, has 1 GB" in best_way(small, replace(H100, block_layers=1, disk_gb=1.0), "jobs").missing
    with pytest.raises(UserError, match="30 layers to linearize"):
        all_ways(small, replace(H100, block_layers=31))
    tiny = replace(H100, memory_gb=0.1)
    assert recommend(all_ways(small, tiny)) == ()


def test_jobs_are_several_commands(large):
    request = replace(H100, gpus=14, block_layers=9, settings=("attention.share_state=query_head",))
    ways = [way for way in all_ways(large, request) if way.mode == "jobs"]
    lines = commands("llama3-405b", recommend(ways), request)
    assert [line.split()[:3] for line in lines] == [
        ["lolcats", "blocks", "prepare"],
        ["lolcats", "blocks", "train"],
        ["lolcats", "blocks", "assemble"],
    ]
    assert "--set attention.share_state=query_head" in lines[0]
    assert "--set attention.share_state" not in lines[1]


def test_one_command_for_both_stages(small):
    request = replace(H100, gpus=16, batch_size=16)
    found = recommend(all_ways(small, request))
    assert {way.stage for way in found} == {"transfer", "adjust"}
    assert "--nnodes 2 --nproc-per-node 8" in commands("m", found, request)[0]


@pytest.mark.parametrize("gpus", [1, 4])
def test_the_command_line_accepts_every_recommended_command(small, gpus):
    request = replace(H100, gpus=gpus, settings=("adjust.distill_factor=0.5",))
    for way in all_ways(small, request):
        if way.missing is not None or way.mode == "jobs":
            continue
        words = shlex.split(commands("m", recommend([way]), request)[0])
        words = words[words.index("linearize") :]
        resolved = CliRunner().invoke(app, [*words, "--dry-run"])
        assert resolved.exit_code == 0, resolved.output
        config = LinearizeConfig.from_dict(yaml.safe_load(resolved.stdout))
        section = getattr(config, way.stage)
        assert (section.batch_size, section.micro_batch_size) == (request.batch_size, way.micro_batch_size)
        assert (config.transfer.enabled, config.adjust.enabled) == (way.stage == "transfer", way.stage == "adjust")
        assert config.parallel.cpu_offload == (OFFLOAD in way.options)
        assert config.model.load_in_4bit == (FOUR_BIT in way.options)
        if way.stage == "adjust":
            assert config.adjust.gradient_checkpointing == (CHECKPOINTING in way.options)
            assert config.adjust.distill_factor == 0.5
        if way.block_layers is not None:
            assert (config.transfer.block_layers, config.transfer.block_mode) == (way.block_layers, way.mode)


def test_gates_are_a_stage_where_there_is_a_budget(large):
    shape = replace(large, chosen={0: [0]})
    assert not {way.stage for way in all_ways(large, H100)} & {"gates"}
    request = replace(H100, gpus=8, gates=GatesSection(batch_size=8), settings=("attention.exact=12%",))
    ways = all_ways(shape, request)
    assert [way.stage for way in recommend(ways)] == ["transfer", "gates", "adjust"]
    one, two = (
        best_way(shape, replace(request, gates=GatesSection(batch_size=8, max_steps=n)), "gates") for n in (1, 2)
    )
    assert (two.flops, two.trained) == (2 * one.flops, 126 * 8)
    assert "--set gates.batch_size=8" in best_way(shape, replace(H100, gpus=8), "gates-sharded").missing
    assert commands("m", recommend(ways), request)[0].endswith("--set attention.exact=12%")


def test_scores_choose_heads_where_gates_do_not_fit(large):
    ways = all_ways(replace(large, chosen={0: [0]}), replace(H100, gpus=8, gates=GatesSection(batch_size=8)))
    assert recommend(ways)[0].block_layers is None
    no_gates = [replace(way, missing="memory") if way.stage == "gates" else way for way in ways]
    transfer, adjust = recommend(no_gates)
    assert transfer.block_layers is not None
    assert adjust.stage == "adjust"
    (alone,) = recommend(way for way in no_gates if way.stage != "adjust")
    assert alone.block_layers is not None


def test_attention_side_by_side(small):
    shape = replace(small, chosen={layer: [0] for layer in range(11)})
    linear, chosen, softmax = side_by_side(shape, H100, [1024, 8192])
    assert [arm.exact_heads for arm in (linear, chosen, softmax)] == [0, 11, 90]
    assert softmax.cache_bytes[8192] == 180 * 2**20
    growth = {arm.name: arm.cache_bytes[8192] - arm.cache_bytes[1024] for arm in (linear, chosen, softmax)}
    assert list(growth.values()) == [0, 11 * 2 * 64 * 2 * 7168, 90 * 2 * 64 * 2 * 7168]
    assert chosen.sequences[8192] == (80 * GB - small.parameters * 2 - chosen_maps(shape)) // chosen.cache_bytes[8192]
    assert linear.prefill_flops[8192] < chosen.prefill_flops[8192] < softmax.prefill_flops[8192]
    assert [list(arm.stage_flops) for arm in (linear, chosen, softmax)] == [
        ["transfer", "adjust"], ["transfer", "gates", "adjust"], ["adjust"]
    ]  # fmt: skip
    assert linear.stage_flops["transfer"] == chosen.stage_flops["transfer"]  # gates come after it
    assert linear.stage_flops["adjust"] < chosen.stage_flops["adjust"]
    named = side_by_side(small.with_exact({7: [2]}), H100, [1024])[1]
    assert list(named.stage_flops) == ["transfer", "adjust"]
    assert named.stage_flops["transfer"] < linear.stage_flops["transfer"]


def chosen_maps(shape) -> int:
    return 4 * shape.after_gates.feature_parameters


def test_requests_are_checked():
    with pytest.raises(UserError, match="not a multiple"):
        replace(H100, micro_batch_size=3)
    with pytest.raises(UserError, match="less than one sequence"):
        replace(H100, tokens=100)
    with pytest.raises(UserError, match=r"h200, h100.*--gpu-memory"):
        find_gpu("tpu")
    assert find_gpu("NVIDIA H200") is GPUS["h200"]


def test_the_hours_say_how_sure_they_are():
    assert utilisation("transfer", 100) == utilisation("transfer", 576) < utilisation("transfer", 2048)
    assert utilisation("transfer", 16384) == utilisation("transfer", 4096)
    h200, h100 = find_gpu("h200"), find_gpu("h100")
    assert "is an assumption" not in confidence(h200, 4096, 8192)
    assert "That h100 reaches the same share of its peak is an assumption" in confidence(h100, 4096, 8192)
    assert "Hidden size 8192 is larger" in confidence(h200, 8192, 8192)
    assert "factor of 1.5" in confidence(h200, 2048, 8192)
    assert "Micro-steps of only 1024 tokens may take twice as long" in confidence(h200, 576, 1024)
