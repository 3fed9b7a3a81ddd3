"""Two processes that each hold a block equal joint training, also after one of them was killed."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console

from lolcats.errors import UserError
from lolcats.parallel.blockwise.layers import divide, merge
from lolcats.parallel.blockwise.pipelined import newest_common
from lolcats.pipeline import linearize

PROCESS = """
import os, signal, sys
from pathlib import Path
from rich.console import Console
from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.pipeline import linearize
from lolcats.training import folder
dies = os.environ["RANK"] == sys.argv[3]
saves, fault = int(sys.argv[4]), sys.argv[5]
save = folder.RunFolder.save
def counted(self, *arguments, **keywords):
    global saves
    saves -= 1
    if dies and saves < 0 and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return save(self, *arguments, **keywords)
folder.RunFolder.save = counted
if dies and fault == "nan":
    from lolcats.training.transfer import TransferStage
    step = TransferStage._gradient_step
    TransferStage._gradient_step = lambda self, inputs, scale: step(self, inputs, scale) | {"loss": float("nan")}
try:
    config = LinearizeConfig.from_yaml(sys.argv[1])
    linearize(config, Path(sys.argv[2]), resume=True, console=Console(quiet=True))
except UserError as error:
    print("refused:", error, flush=True)
    os._exit(3)
"""


@pytest.fixture
def start(tmp_path):
    """Run a configuration in several processes; (exit codes, what they printed)."""

    def run(config, output, *, processes=2, dying=-1, saves=99, fault="kill"):
        file = tmp_path / "config.yaml"
        file.write_text(config.to_yaml())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = []
        for rank in range(processes):
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-c", PROCESS, str(file), str(output), str(dying), str(saves), fault]
            started.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        try:
            texts = [process.communicate(timeout=240)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        return [process.returncode for process in started], texts

    return run


def test_equal_to_joint_training_after_a_kill(configure, joint, feature_maps, start, tmp_path):
    output = tmp_path / "out"
    config = configure(transfer={"block_mode": "pipelined", "block_layers": 2}, parallel={"timeout": 60})
    began = time.monotonic()
    codes, texts = start(config, output, dying=1, saves=2)
    assert codes == [3, -9], texts
    assert time.monotonic() - began < 200  # seconds: the other process does not wait for ever
    assert "vanished or does not answer" in texts[0]
    assert sorted(path.name for path in (output / "run/transfer/block-000").glob("step-*"))[0] == "step-00000004"
    assert [path.name for path in (output / "run/transfer/block-001").glob("step-*")] == ["step-00000004"]

    codes, texts = start(config, output)
    assert codes == [0, 0], texts
    found, expected = feature_maps(output), feature_maps(joint(2)[0])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_several_blocks_per_process(configure, joint, feature_maps, start, tmp_path):
    codes, texts = start(configure(transfer={"block_mode": "pipelined"}), tmp_path / "out")
    assert codes == [0, 0], texts
    for name, tensor in feature_maps(joint(1)[0]).items():
        assert torch.equal(feature_maps(tmp_path / "out")[name], tensor), name


def test_nan_in_one_process_ends_all(configure, start, tmp_path):
    config = configure(transfer={"block_mode": "pipelined"}, parallel={"timeout": 60})
    codes, texts = start(config, tmp_path / "out", dying=1, fault="nan")
    assert codes == [3, 3], texts
    assert all("rank 1: stage transfer, step 1: the loss is nan" in text for text in texts), texts[0][-900:]


def test_one_process_and_early_stopping_are_refused(configure, tmp_path):
    config = configure(transfer={"block_mode": "pipelined"})
    with pytest.raises(UserError, match="needs several processes"):
        linearize(config, tmp_path / "out", console=Console(quiet=True))
    with pytest.raises(UserError, match="early_stopping would stop one process"):
        configure(transfer={"block_mode": "pipelined", "early_stopping": 2})


def test_blocks_are_divided_among_processes():
    blocks = divide([0, 1, 2, 4, 5, 6, 7], 2)
    assert [(block.begin, block.end, block.linear) for block in blocks] == [
        (0, 2, (0, 1)),
        (2, 5, (2, 4)),
        (5, 7, (5, 6)),
        (7, 8, (7,)),
    ]
    merged = merge(blocks, 3)
    assert [(block.begin, block.end, block.is_last) for block in merged] == [(0, 2, False), (2, 5, False), (5, 8, True)]
    with pytest.raises(UserError, match=r"4 blocks .* 5 processes"):
        merge(blocks, 5)


def test_newest_common_step():
    assert newest_common([[50, 100], [50]]) == (50, 100)
    assert newest_common([[100], [50]]) == (None, 100)
    assert newest_common([[], []]) == (None, 0)
