"""Workers that share a folder make every shard, wait for each other, and take over what the dead have left."""

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from data_gen import claims as claims_module
from data_gen.claims import Claims
from specvocab_model.config import ConfigError
from tests.data_gen.runs import ENVIRONMENT


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(claims_module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(claims_module, "LEASE_S", 0.5)


def missing_of(folder, count):
    return lambda: [index for index in range(count) if not (folder / f"{index}").exists()]


def work(folder, count, *, first=0, seconds=0.0) -> list[int]:
    """Make what is missing; returns what this worker made."""
    made, missing = [], missing_of(folder, count)
    with Claims(folder) as claims:
        while missing():
            index = claims.take(missing, first=first)
            if index is None:
                time.sleep(0.01)
                continue
            time.sleep(seconds)
            (folder / f"{index}").touch()
            made.append(index)
            claims.release(index)
    return made


def test_one_worker_makes_all_and_leaves_no_claim(tmp_path):
    assert sorted(work(tmp_path, 5, first=3)) == list(range(5))
    assert work(tmp_path, 5) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(index) for index in range(5)]


def test_a_slow_worker_does_not_hold_the_fast_ones(tmp_path):
    made: dict[str, list[int]] = {}
    threads = [threading.Thread(target=lambda name=name, first=first, seconds=seconds: made.update(
        {name: work(tmp_path, 20, first=first, seconds=seconds)}))
        for first, (name, seconds) in enumerate({"slow": 1.0, "fast": 0.005, "also fast": 0.005}.items())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made["slow"] + made["fast"] + made["also fast"]) == list(range(20)), "each shard once"
    assert 1 <= len(made["slow"]) < 10


def test_what_a_killed_worker_had_claimed_is_taken_over(tmp_path):
    code = ("from pathlib import Path; from data_gen.claims import Claims; import time\n"
            f"with Claims(Path({str(tmp_path)!r})) as claims:\n"
            "    print(claims.take(lambda: [0, 1]), flush=True); time.sleep(60)\n")
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert worker.stdout.readline() == "0\n"
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert (tmp_path / ".shard-00000.claim").read_text() == f"{socket.gethostname()} {worker.pid}"
    assert sorted(work(tmp_path, 2)) == [0, 1]


def test_a_claim_of_another_host_holds_while_it_is_touched_and_no_longer(tmp_path):
    claim = tmp_path / ".shard-00000.claim"
    claim.write_text("elsewhere 1")
    over = threading.Event()

    def heart():
        while not over.wait(0.05):
            os.utime(claim)

    beating = threading.Thread(target=heart)
    beating.start()
    worker = threading.Thread(target=work, args=(tmp_path, 2))
    worker.start()
    time.sleep(1.5)  # three leases
    assert (tmp_path / "1").exists() and not (tmp_path / "0").exists()
    over.set()
    beating.join()
    worker.join(timeout=20)
    assert (tmp_path / "0").exists()


def test_a_claim_that_names_no_process_holds_until_its_lease_is_over(tmp_path):
    here = socket.gethostname().encode()
    for index, content in enumerate([b"", b"\xff\xfe", here + b" x", here + b" " + b"9" * 30, here + b" -1"]):
        (tmp_path / f".shard-{index:05d}.claim").write_bytes(content)
        assert not Claims(tmp_path)._is_abandoned(tmp_path / f".shard-{index:05d}.claim")
    assert sorted(work(tmp_path, 5)) == list(range(5))


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_the_heart_beats_on_when_the_file_server_is_away(tmp_path, monkeypatch, capfd, code):
    """And says so once. Another worker that cannot read a claim leaves it alone."""
    utime, away, touched = os.utime, threading.Event(), threading.Event()

    def out_of_reach(path, times=None):
        if path.name.endswith(".claim") and away.is_set():
            touched.set()
            raise OSError(code, os.strerror(code))
        utime(path, times)

    away.set()
    monkeypatch.setattr(os, "utime", out_of_reach)
    with Claims(tmp_path) as claims:
        assert claims.take(missing_of(tmp_path, 1)) == 0
        assert touched.wait(10)
        touched.clear()
        assert touched.wait(10), "it goes on trying"
        claim = tmp_path / ".shard-00000.claim"
        utime(claim, (0, 0))
        away.clear()
        while claim.stat().st_mtime == 0:
            assert claims._heart.is_alive()
    assert capfd.readouterr().err.count(f"cannot touch {tmp_path}/.shard-00000.claim: {os.strerror(code)}; try") == 1


def test_a_claim_that_cannot_be_read_or_removed_stops_nobody(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.ESTALE, "Stale file handle")

    claim = tmp_path / ".shard-00000.claim"
    claim.write_text("elsewhere 1")
    with Claims(tmp_path) as claims, monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fail)
        assert not claims._is_abandoned(claim)
        patched.setattr(Path, "rename", fail)
        claims._bury(claim)
        patched.setattr(Path, "unlink", fail)
        claims.release(0)
    assert not claim.exists()


def test_a_worker_that_fails_gives_its_claim_back(tmp_path):
    with pytest.raises(RuntimeError), Claims(tmp_path) as claims:
        assert [claims.take(missing_of(tmp_path, 3)) for _ in range(2)] == [0, 1]
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_worker_may_hold_several_claims_and_none_twice(tmp_path):
    missing = missing_of(tmp_path, 3)
    with Claims(tmp_path) as claims, Claims(tmp_path) as other:
        assert [claims.take(missing, first=1), other.take(missing, first=1), claims.take(missing)] == [1, 2, 0]
        assert claims.take(missing) is None and other.take(missing) is None
        claims.release(1)
        assert other.take(missing) == 1


def test_a_full_disk_is_one_line_and_leaves_no_claim(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit fails as it does on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(ConfigError, match=r"cannot write .*\.shard-00000\.claim: .*; see to the disk"):
            work(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []
