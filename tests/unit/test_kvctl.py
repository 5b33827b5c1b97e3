"""The console scripts, as pip makes them."""

from __future__ import annotations

import fcntl
import math
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

SCRIPT = "import sys; from kvcached._kvctl import main; sys.argv[0] = sys.argv.pop(1); sys.exit(main())"

#: An instance whose pool has memory.
WORK = """
import sys
from kvcached import KVCacheManager, vmm_ops
vmm_ops.init_kvcached("cpu")
manager = KVCacheManager(1024, 16, 4096, 2)
manager.free(manager.alloc(300))
held = manager.alloc(100)
print("ready", flush=True)
sys.stdin.read()
manager.free(held)
manager.shutdown()
vmm_ops.shutdown_kvcached()
"""


def script(name: str, *args: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT, f"/usr/bin/{name}", *args]


def run(name: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | env
    return subprocess.run(script(name, *args), capture_output=True, text=True, check=False, env=environment)


def test_exit_codes_are_those_of_the_binary():
    assert run("kvctl", "list").returncode == 0
    assert run("kvctl", "limit", "nobody-of-this-name", "1G").returncode == 1
    ended = run("kvctl", "limit", "nobody-of-this-name", "1GB")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "units are binary here: write G or GiB" in ended.stderr


def test_doctor_runs_in_this_python_unless_another_is_named():
    shown = run("kvctl", "doctor", "--help", PATH="/nothing")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("usage: kvctl doctor") and "--model" in shown.stdout
    wrong = run("kvctl", "doctor", "--block-size", "0", PATH="/nothing")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--block-size are at least 1" in wrong.stderr
    other = run("kvctl", "doctor", KVCACHED_PYTHON="/nothing/python")
    assert (other.returncode, other.stdout) == (1, "")
    assert "cannot run /nothing/python" in other.stderr and "--python PATH" in other.stderr


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


def test_metrics_are_an_exposition_that_another_parser_reads():
    name = "test-kvctl-metrics"
    worker = subprocess.Popen(
        [sys.executable, "-c", WORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"KVCACHED_IPC_NAME": name, "KVCACHED_LIMIT": "1G", "KVCACHED_MIN": "1M"},
    )
    assert worker.stdout.readline() == "ready\n"
    shown = run("kvctl", "metrics")
    worker.communicate()
    assert (worker.returncode, shown.returncode, shown.stderr) == (0, 0, "")
    families = {family.name: family for family in text_string_to_metric_families(shown.stdout)}
    assert all(family.documentation for family in families.values())
    types = {family.type for family in families.values()}
    assert types == {"gauge", "counter", "histogram"}, "no line is of a family that was not announced"

    def samples(family, sample=None):
        found = families[family].samples
        return [s for s in found if s.labels.get("instance") == name and s.name == (sample or s.name)]

    (limit,), (used,) = samples("kvcached_limit_bytes"), samples("kvcached_used_bytes")
    assert (limit.value, limit.labels["device"]) == (1 << 30, "cpu")
    assert used.value > 0 and used.labels["pool"]
    (mapped,) = samples("kvcached_mapped_pages", "kvcached_mapped_pages_total")
    assert mapped.value > 0
    buckets = samples("kvcached_map_seconds", "kvcached_map_seconds_bucket")
    bounds, counts = [float(s.labels["le"]) for s in buckets], [s.value for s in buckets]
    assert bounds == sorted(bounds) and bounds[-1] == math.inf
    assert counts == sorted(counts)
    (count,) = samples("kvcached_map_seconds", "kvcached_map_seconds_count")
    (total,) = samples("kvcached_map_seconds", "kvcached_map_seconds_sum")
    assert counts[-1] == count.value > 0 and 0 < total.value < 60


def test_a_metrics_server_ends_when_it_is_told_to():
    server = subprocess.Popen(
        script("kvctl", "metrics", "--listen", "0"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    address = server.stdout.readline().removeprefix("metrics at ").strip()
    with urllib.request.urlopen(address, timeout=60) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.status == 200
    server.terminate()
    assert server.communicate(timeout=60) == ("", "")
    assert server.returncode == 0
