"""`lolcats blocks`: the jobs, from the command line."""

import json


def test_prepare_train_assemble(cli, model_dir, data_file, tmp_path):
    jobs, output = tmp_path / "jobs", tmp_path / "out"
    settings = [
        "data.sequence_length=48",
        "data.validation_rows=10",
        "transfer.data=null",
        "attention.window_size=4",
        "model.device=cpu",
    ]
    settings += ["transfer.max_steps=1", "transfer.batch_size=2", "transfer.micro_batch_size=2"]
    options = [part for setting in settings for part in ("--set", setting)]

    def run(*arguments):
        result = cli("blocks", *arguments)
        assert result.exit_code == 0, result.output
        return result.output

    options += ["--recipe", "lolcats-linear", "--no-adjust", "--block-layers", 1]
    run("prepare", model_dir, "--data", data_file, "-o", jobs, *options)
    run("train", jobs, "--block", 1, "--device", "cpu")
    refused = cli("blocks", "assemble", jobs, "-o", output)
    assert refused.exit_code == 1
    assert "1 of 2 blocks" in refused.output
    run("train", jobs, "-b", 0)
    run("assemble", jobs, "-o", output)
    report = json.loads((output / "lolcats_report.json").read_text())
    assert len(report["stages"]["transfer"]["blocks"]) == 2
