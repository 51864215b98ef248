"""What the child inherits, what becomes of its stderr, and its end with the front end's."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import uvloop
from supervisor_rig import SCRIPTED_ENGINE, Rig, generate, gone

from s2moe.engine.messages import Finished, Step
from s2moe.server.engine_client import EngineDiedError
from s2moe.server.engine_process import MAX_STDERR_LINE_BYTES, STDERR_TAIL_LINES, engine_environment


async def test_the_child_gets_its_socket_and_nothing_else_of_ours(rig: Rig) -> None:
    (step, _) = await rig.run("describe-fds", "finish")
    assert isinstance(step, Step)
    targets = {int(fd): target for fd, target in json.loads(step.content).items()}
    assert targets[0] == "/dev/null"
    assert targets[1] == targets[2]
    assert targets[2].startswith("pipe:")
    others = [target for fd, target in targets.items() if fd > 2]
    assert [target.partition(":")[0] for target in others if not target.startswith("/proc/")] == ["socket"]


async def test_the_child_is_out_of_reach_of_the_terminals_ctrl_c(rig: Rig) -> None:
    assert os.getpgid(rig.pid) == rig.pid != os.getpgid(0)
    assert os.getsid(rig.pid) == rig.pid != os.getsid(0)


def test_the_child_waits_without_spinning_unless_the_operator_chose() -> None:
    assert engine_environment({"A": "b"}) == {"A": "b", "GOMP_SPINCOUNT": "400", "MALLOC_ARENA_MAX": "2"}
    chosen = {"GOMP_SPINCOUNT": "7", "MALLOC_ARENA_MAX": "9"}
    assert engine_environment(chosen) == chosen
    assert "GOMP_SPINCOUNT" not in engine_environment({"OMP_WAIT_POLICY": "active"})


def environment_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


async def test_the_child_gets_this_environment(rig: Rig) -> None:
    environment = environment_of(rig.pid)
    assert "GOMP_SPINCOUNT=400" in environment
    assert "MALLOC_ARENA_MAX=2" in environment


async def test_stderr_is_logged_by_line_bounded_and_kept_for_the_report(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "s2moe")
    n_lines = 20_000
    with pytest.raises(EngineDiedError):
        await rig.run(f"flood:{n_lines}", "step:x", "exit:1")
    await rig.ready()
    lines = [record.getMessage() for record in caplog.records if record.name == "s2moe.engine"]
    flood = [line for line in lines if line.startswith("flood ")]
    assert flood == [f"flood {i}" for i in range(n_lines)]
    assert "no newline at the end" in lines
    cut = [line for line in lines if line.startswith("xxx")]
    assert len(cut) == 1
    assert MAX_STDERR_LINE_BYTES <= len(cut[0]) < MAX_STDERR_LINE_BYTES + 40
    (report,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert report.startswith("engine exited with code 1")
    assert f"flood {n_lines - 1} | no newline at the end" in report
    assert len(report) < 2000
    assert STDERR_TAIL_LINES == 50


def test_the_engine_ends_when_the_front_end_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import asyncio, sys
        sys.path.insert(0, sys.argv[1])
        from pathlib import Path
        from supervisor_rig import Rig

        async def main():
            rig = Rig(Path(sys.argv[2]))
            await rig.supervisor.start()
            await rig.ready()
            print(rig.pid, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    front_end = subprocess.Popen(
        [sys.executable, "-c", program, str(SCRIPTED_ENGINE.parent), str(tmp_path)], stdout=subprocess.PIPE
    )
    assert front_end.stdout is not None
    pidfd = os.pidfd_open(int(front_end.stdout.readline()))
    front_end.kill()
    front_end.wait()
    front_end.stdout.close()
    try:
        ended, _, _ = select.select([pidfd], [], [], 10)
        assert ended, "the engine outlived its front end"
    finally:
        if not ended:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def test_the_whole_life_works_under_uvloop_too(tmp_path: Path) -> None:
    async def live() -> None:
        rig = Rig(tmp_path)
        await rig.supervisor.start()
        await rig.ready()
        assert isinstance((await rig.run("started", "step:x", "finish"))[-1], Finished)
        stream = generate(rig.supervisor, rig.request("started", "until-abort"))
        await anext(stream)
        await stream.aclose()
        with pytest.raises(EngineDiedError):
            await rig.run("step:x", "kill")
        await rig.ready()
        pid = rig.pid
        await rig.supervisor.stop(4)
        assert rig.observer.restarts == ["crash"]
        assert "killed by signal 9" in rig.observer.restart_details[0]
        assert gone(pid)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(live())
