"""Code of a policy runs with a hard time limit, a memory limit and no network, and its output is the reply."""

import sys
import threading
from pathlib import Path

import pytest
from waiting import HANG_S, QUICK_S

from rlcanary.errors import UserError
from rlcanary.grpo.tools.python_tool import PythonTool, code_blocks
from rlcanary.system.processes import identify

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code is confined by means of Linux")


@pytest.fixture
def tool() -> PythonTool:
    return PythonTool(timeout=HANG_S)


def answer(*codes: str) -> str:
    return "Let me see.\n" + "\n".join(f"```python\n{code}\n```\nand" for code in codes)


def test_reply_is_what_the_blocks_print_and_they_share_their_names(tool: PythonTool) -> None:
    assert tool.reply(answer("def square(x):\n    return x * x", "print('it is', square(12))")) == "it is 144"


def test_answer_without_a_closed_python_block_has_no_reply(tool: PythonTool) -> None:
    for text in ("no code", "```\nprint(1)\n```", "```python\nprint(1)", "```bash\nls\n```"):
        assert code_blocks(text) == []
        assert tool.reply(text) is None


def test_exception_is_part_of_the_reply_without_a_path_of_this_machine(tool: PythonTool) -> None:
    reply = tool.reply(answer("print('before')\nfor i in range(3):\n    1 / (1 - i)"))
    assert reply is not None
    assert reply.startswith("before\nTraceback")
    assert 'File "answer.py", line 3' in reply
    assert "1 / (1 - i)" in reply
    assert reply.endswith("ZeroDivisionError: division by zero\n[the code raised an exception]")
    assert "/tmp" not in reply
    assert "confined" not in reply
    assert tool.run("def f(:").problem == "exception"
    assert tool.run("import sys; sys.exit(3)").problem == "exception"
    assert tool.run("import sys; sys.exit(0)").problem is None


def test_code_that_hangs_is_ended_when_its_time_is_up_and_what_it_printed_is_kept() -> None:
    result = PythonTool(timeout=QUICK_S).run(
        "import os, signal, time\nfor s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, signal.SIG_IGN)\n"
        "print(os.getpid())\ntime.sleep(9999)"
    )
    assert result.problem == "timeout"
    assert identify(int(result.output)) is None


def test_memory_is_limited(tool: PythonTool) -> None:
    assert "MemoryError" in PythonTool(memory_bytes=2**28).run("x = bytearray(2**29)").output
    assert tool.run("x = bytearray(2**24); print(len(x))").output == f"{2**24}\n"


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
    ],
)
def test_there_is_no_network(tool: PythonTool, code: str) -> None:
    result = tool.run(code)
    assert result.problem == "exception"
    assert "Operation not permitted" in result.output


@pytest.mark.parametrize(
    "code",
    ["import os; os.fork()", "import subprocess; subprocess.run(['true'])", "import os; os.kill(os.getppid(), 0)"],
)
def test_no_process_can_be_started_or_signalled(tool: PythonTool, code: str) -> None:
    result = tool.run(code)
    assert result.problem == "exception"
    assert "Operation not permitted" in result.output or "PermissionError" in result.output


def test_threads_work(tool: PythonTool) -> None:
    code = "import threading\nt = threading.Thread(target=print, args=('there',))\nt.start()\nt.join()"
    assert tool.run(code).output == "there\n"


def test_environment_and_folder_are_empty(tool: PythonTool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    result = tool.run("import os, sys; print(os.listdir(), 'SECRET_TOKEN' in os.environ, sys.stdin.read() == '')")
    assert result.output == "[] False True\n"


def test_folder_of_the_code_is_gone_afterwards(tool: PythonTool) -> None:
    folder = tool.run("import os; open('left', 'w').close(); print(os.getcwd())").output.strip()
    assert not Path(folder).exists()


def test_output_without_end_is_cut() -> None:
    result = PythonTool(timeout=HANG_S, output_characters=100).run("while True:\n    print('ä' * 100000)")
    assert result.output == "ä" * 100
    assert result.problem == "exception"


def test_silent_code_says_so(tool: PythonTool) -> None:
    assert tool.reply(answer("x = 1")) == "[no output]"


def test_concurrent_runs_do_not_wait_for_each_other(tool: PythonTool, tmp_path: Path) -> None:
    code = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.01)"
    waiting = threading.Thread(target=tool.run, args=(code,))
    waiting.start()
    assert tool.run("print(1)").output == "1\n"
    assert waiting.is_alive()
    (tmp_path / "end").touch()
    waiting.join()


def test_code_that_cannot_be_confined_is_not_run() -> None:
    with pytest.raises(RuntimeError, match="could not be confined"):
        PythonTool(memory_bytes=2**70).run("print('ran')")


@pytest.mark.parametrize("limit", ["timeout", "memory_bytes", "output_characters"])
def test_limits_have_to_be_positive(limit: str) -> None:
    with pytest.raises(UserError, match=f"{limit}=0"):
        PythonTool(**{limit: 0})
