"""The console scripts, as pip makes them."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

SCRIPT = "import sys; from kvcached._kvctl import main; sys.argv[0] = sys.argv.pop(1); sys.exit(main())"


def script(name: str, *args: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT, f"/usr/bin/{name}", *args]


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(script(name, *args), capture_output=True, text=True, check=False)


def test_exit_codes_are_those_of_the_binary():
    assert run("kvctl", "list").returncode == 0
    assert run("kvctl", "limit", "nobody-of-this-name", "1G").returncode == 1
    ended = run("kvctl", "limit", "nobody-of-this-name", "1GB")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "units are binary here: write G or GiB" in ended.stderr


def test_kvtop_is_kvctl_top():
    assert "Usage: kvctl top" in run("kvtop", "--help").stdout
    ended = run("kvtop")
    message = "error: standard output is no terminal; use kvctl list or kvctl watch\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", message)


def test_an_interrupted_watch_is_done(tmp_path):
    command = script("kvctl", "watch", "--interval", "600", "--dir", str(tmp_path / "none"))
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watch.stdout.readline() == "no instances\n"
    watch.send_signal(signal.SIGINT)
    assert watch.communicate(timeout=60) == ("", "")
    assert watch.returncode == 0


def test_kvtop_gives_the_terminal_back(tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 80, 0, 0))  # rows, columns
    before = termios.tcgetattr(theirs)
    command = script("kvtop", "--dir", str(tmp_path / "none"))
    top = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    shown = b""
    while b"quit" not in shown:
        shown += os.read(ours, 65536)
    os.write(ours, b"q")
    assert top.wait(timeout=60) == 0
    assert termios.tcgetattr(theirs) == before
    assert b"\x1b[?1049l" in os.read(ours, 65536), "the screen that was there before"
    os.close(ours)
    os.close(theirs)
