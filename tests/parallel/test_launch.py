"""The launch scripts: two "machines" on this one meet, one is lost, and the same command resumes."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from ranks import environment, free_port, largest_difference

from lolcats.config import LinearizeConfig, merge
from lolcats.training.checkpoint import finished

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 180
LONG = {"transfer": {"max_steps": 80, "eval_every": 40}, "adjust": {"enabled": False}}


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_the_scripts_are_valid_and_say_what_they_need(name):
    script = EXAMPLES / name
    subprocess.run(["bash", "-n", script], check=True)
    variables = {key: value for key, value in os.environ.items() if key != "OUTPUT"}
    refused = subprocess.run(["bash", script], env=variables, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "OUTPUT: folder for the linearized model" in refused.stderr


def start(folder, port, recipe):
    """One machine's share of a run, by examples/torchrun.sh."""
    variables = {"NODES": "2", "PROCESSES": "1", "RESTARTS": "0", "PORT": str(port), "RUN_ID": str(port)}
    log = (folder / f"log-{time.monotonic_ns()}.txt").open("w")
    return subprocess.Popen(
        ["bash", EXAMPLES / "torchrun.sh", "--recipe", recipe],
        env=environment(OUTPUT=str(folder / "out"), **variables),
        stdout=log,
        stderr=log,
    )


def wait_until(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def kill_machine(agent):
    """The agent and the processes that it started, all at once."""
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(agent.pid)], capture_output=True, text=True, check=False
    )
    for pid in [agent.pid, *map(int, children.stdout.split())]:
        os.kill(pid, signal.SIGKILL)
    agent.wait()


def begin(folder, recipe):
    port = free_port()
    first = start(folder, port, recipe)
    wait_until(lambda: listens(port) or first.poll() is not None, "the first machine waits for the others")
    return first, start(folder, port, recipe)


def logs(folder):
    return "\n".join(path.read_text() for path in sorted(folder.glob("log-*.txt")))


@pytest.mark.slow
def test_a_lost_machine_and_resume(both_stages, alone, weights, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(LinearizeConfig.from_dict(merge(both_stages, LONG)).to_yaml())
    stage = tmp_path / "out" / "run" / "transfer"
    machines = begin(tmp_path, recipe)
    try:
        wait_until(lambda: list(stage.glob("step-*")) or machines[0].poll() is not None, "a checkpoint appears")
        kill_machine(machines[1])
        assert machines[0].wait(DEADLINE_S) != 0, logs(tmp_path)
        assert finished(stage) is None
        assert "another process of this run failed" in logs(tmp_path)
        machines = begin(tmp_path, recipe)
        assert [machine.wait(DEADLINE_S) for machine in machines] == [0, 0], logs(tmp_path)
    finally:
        for machine in machines:
            machine.kill()
    assert "resuming from" in logs(tmp_path)
    # Adam divides by the gradients' size: over 80 updates their rounding shows
    assert largest_difference(weights(tmp_path / "out"), weights(alone(LONG)[0])) < 1e-4
