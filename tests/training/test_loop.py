import pytest
import torch
from toy_stage import ToyStage, copy_weights, equal_weights, folders, kill_at, run

from lolcats.config import AdjustSection, TransferSection
from lolcats.errors import UserError
from lolcats.training import device, loop
from lolcats.training.stage import weights_of


def test_training_lowers_the_loss_and_reports_it(tmp_path):
    result = run(ToyStage(), tmp_path)
    assert [entry["step"] for entry in result.history] == [0, 3, 6, 9, 12]
    assert result.history[0]["loss"] == ToyStage().evaluate()["loss"]
    assert result.history[-1]["loss"] < 0.9 * result.history[0]["loss"]
    assert (result.steps, result.tokens) == (12, 12 * 6 * 3)
    assert min(result.seconds, result.tokens_per_second) > 0
    assert result.peak_memory_bytes > 1e6  # at least torch itself


def test_history_averages_training_scalars_since_the_last_evaluation(tmp_path):
    every = run(ToyStage(), tmp_path / "every", eval_every=1).history
    third = run(ToyStage(), tmp_path / "third", eval_every=3).history
    assert every[0]["train"] == {}
    mean = sum(entry["train"]["first"] for entry in every[4:7]) / 3
    assert third[2]["train"]["first"] == pytest.approx(mean, rel=1e-6)  # float32 losses, summed in float64


@pytest.mark.parametrize(("epochs", "steps"), [(1, 4), (2.5, 10), (0.01, 1)])
def test_epochs_decide_the_steps(tmp_path, epochs, steps):
    """The last one is evaluated and saved, also where it is no multiple of what `eval_every` says."""
    result = run(ToyStage(), tmp_path, epochs=epochs, max_steps=None)
    assert result.steps == result.history[-1]["step"] == steps
    assert folders(tmp_path)[-1] == f"step-{steps:08d}"


def trained(stage, directory, **options):
    run(stage, directory, **options)
    return weights_of(stage)


def test_accumulation_equals_the_big_batch(tmp_path):
    class Wrong(ToyStage):
        def micro_step(self, batch, scale):
            return super().micro_step(batch, 1.0 if self.micro_steps % 2 else scale)

    def weights(stage, micro_size):
        name = f"{type(stage).__name__}-{micro_size}"
        return trained(stage, tmp_path / name, micro_batch_size=micro_size, clip_norm=0.5)

    whole = weights(ToyStage(), 6)
    for micro_size in (3, 1):
        # float32 sums in another order, 12 updates
        torch.testing.assert_close(weights(ToyStage(), micro_size), whole, rtol=1e-5, atol=1e-6)
    assert (weights(Wrong(), 3)["layers.0.weight"] - whole["layers.0.weight"]).abs().max() > 1e-3


# clipped to 1e-8, AdamW's eps, the size of a gradient matters; lr 1 overshoots, each layer at its own time
BLOCK_RUN = {"lr": 1.0, "clip_norm": 1e-8, "eval_every": 1, "plateau_patience": 0, "plateau_factor": 0.5}


class Watched(ToyStage):
    """Keeps its weights at every evaluation."""

    def evaluate(self):
        self.seen = [*getattr(self, "seen", []), copy_weights(self)]
        return super().evaluate()


def test_blocks_train_as_if_alone(tmp_path):
    both = Watched(per_block=True)
    rates = [entry["lr"] for entry in run(both, tmp_path / "together", **BLOCK_RUN).history]
    assert any(first != second for first, second in rates)
    weights = {}
    for number in (0, 1):
        alone = Watched(per_block=True, only=number)
        history = run(alone, tmp_path / str(number), **BLOCK_RUN).history
        assert [entry["lr"] for entry in history] == [[pair[number]] for pair in rates]
        weights.update(alone.seen[-1])
    assert equal_weights(both.seen[-1], weights)


@pytest.mark.parametrize("clip_norm", [None, 1e-8])
def test_joint_training_clips_over_all_layers(tmp_path, clip_norm):
    """Without clipping AdamW treats every number alone, so blocks and joint training agree."""
    joint, blocks = (
        trained(ToyStage(per_block=per_block), tmp_path / str(per_block), clip_norm=clip_norm, schedule="constant")
        for per_block in (False, True)
    )
    assert equal_weights(joint, blocks) == (clip_norm is None)


def test_best_weights_are_restored(tmp_path):
    stage = Watched(metrics=[5.0, 4.0, 2.0, 3.0, 2.0])
    result = run(stage, tmp_path)
    assert (result.best_step, result.best_metric) == (6, 2.0)
    assert equal_weights(weights_of(stage), stage.seen[2])
    assert not equal_weights(stage.seen[4], stage.seen[2])
    assert folders(tmp_path) == ["step-00000012"]


def test_training_that_only_harms_ends_with_the_weights_before_it(tmp_path):
    stage = ToyStage(metrics=[1.0, 2.0])
    before = copy_weights(stage)
    assert run(stage, tmp_path).best_step == 0
    assert equal_weights(weights_of(stage), before)


def test_order_and_dropout_follow_the_seed(tmp_path):
    weights = []
    for index, seed in enumerate((0, 0, 1)):
        stage = ToyStage(dropout=0.3)
        torch.rand(index)  # what was drawn before does not matter
        weights.append(trained(stage, tmp_path / str(index), seed=seed))
    assert equal_weights(weights[0], weights[1])
    assert not equal_weights(weights[0], weights[2])


def test_losses_read_late_are_the_same_losses(tmp_path, monkeypatch):
    early = run(ToyStage(), tmp_path / "early", eval_every=5, max_steps=10)
    monkeypatch.setitem(loop.READ_EVERY, "cpu", 4)
    late = run(ToyStage(), tmp_path / "late", eval_every=5, max_steps=10)
    assert [entry["train"] for entry in early.history] == [entry["train"] for entry in late.history]
    assert late.history[1]["train"]["loss"] > 0


@pytest.mark.parametrize("every", [4, 100])
@pytest.mark.parametrize("read_every", [1, 5])
def test_a_checkpoint_after_so_many_updates_or_seconds_whichever_comes_first(tmp_path, monkeypatch, every, read_every):
    """An update takes 70 seconds by this clock, so that 600 are over with the ninth."""
    monkeypatch.setitem(loop.READ_EVERY, "cpu", read_every)
    saved, stage = [], ToyStage()
    monkeypatch.setattr(loop, "monotonic", lambda: 70.0 * (stage.micro_steps // 3))
    monkeypatch.setattr(loop, "write_checkpoint", lambda *_: saved.append(stage.micro_steps // 3))
    run(stage, tmp_path, eval_every=100, checkpoint_every=every)
    slow = 10 if read_every == 5 else 9  # the time is looked at when losses are read
    assert saved == ([4, 8, 12] if every == 4 else [slow, 12])


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        MemoryError(),
    ],
)
def test_out_of_memory_says_what_to_lower(tmp_path, error):
    stage = ToyStage(before_step=kill_at(14, error))
    with pytest.raises(UserError, match=r"toy, step 5: out of cpu .*toy.micro_batch_size=1 \(now 2\).*step-00000004"):
        run(stage, tmp_path)


def test_what_needs_least_memory_is_not_advised():
    def explain(stage, config):
        return device.explain_out_of_memory(MemoryError(), stage, config, torch.device("cpu"))

    thrifty = AdjustSection(batch_size=8, micro_batch_size=1, gradient_checkpointing=True, cuda_graphs="off")
    assert explain("adjust", thrifty) == "out of cpu memory. Less is needed with a lower data.sequence_length."
    assert "adjust.gradient_checkpointing=true (now false)" in explain("adjust", AdjustSection())
    assert "transfer.xent_factor=0.0 (now 2.0)" in explain("transfer", TransferSection(xent_factor=2.0))


def test_other_errors_pass_unchanged(tmp_path):
    stage = ToyStage(before_step=kill_at(1, RuntimeError("shapes cannot be multiplied")))
    with pytest.raises(RuntimeError, match="shapes"):
        run(stage, tmp_path)
