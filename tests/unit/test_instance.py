"""The record of this process, from outside."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import os, sys
from kvcached import _core
from kvcached.instance import hardware, process_record
record = process_record("test 1.0", "cpu", [hardware("cpu")])
assert process_record("test 1.0", "cpu", [hardware("cpu")]) is record
assert os.stat(record.path).st_mode & 0o777 == 0o600
print(record.path, flush=True)
sys.stdin.read()
"""


def instances() -> dict[str, dict]:
    command = [
        sys.executable,
        "-c",
        "from kvcached._kvctl import main; raise SystemExit(main())",
        "list",
        "--json",
    ]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {row["name"]: row for row in json.loads(shown)["instances"]}


def test_a_record_lives_as_long_as_its_process(monkeypatch):
    monkeypatch.setenv("KVCACHED_IPC_NAME", "test-instance-record")
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    path = process.stdout.readline().strip()
    shown = instances()["test-instance-record"]
    assert (shown["engine"], shown["device"], shown["pid"]) == ("test 1.0", "cpu", process.pid)
    process.communicate()
    assert process.returncode == 0
    assert "test-instance-record" not in instances()
    assert subprocess.run(["test", "-e", path], check=False).returncode == 1, "the file is removed at exit"
