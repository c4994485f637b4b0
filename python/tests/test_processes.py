"""Threads, forked processes and interpreters beside each other."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from reference import arrays

import fa_attn


def test_a_forked_process_computes():
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    q, k, v = arrays(23, (2, 300, 4, 32), (2, 300, 2, 32), (2, 300, 2, 32))
    want = fa_attn.flash_attn_func(q, k, v, causal=True)
    child = os.fork()
    if child == 0:
        same = np.array_equal(fa_attn.flash_attn_func(q, k, v, causal=True), want)
        plans = fa_attn.plan(fa_attn.problem(1, 512, heads=4, head_dim=64), limit=1)
        os._exit(0 if same and plans["forward"]["plans"] else 1)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the forked process hangs")


_NO_THREADS = """
import os, resource, sys, threading, warnings
import numpy as np
import fa_attn
q, k, v, out, lse, dout = np.load(sys.argv[1]).values()
if os.getuid() == 0:  # whose processes are not limited
    os.setgid(65534)
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    threading.Thread(target=int).start()
except RuntimeError:
    pass
else:
    sys.exit(77)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        got = fa_attn.flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
    fa_attn.flash_attn_backward(dout, q, k, v, *got, causal=True)
assert np.array_equal(got[0], out) and np.array_equal(got[1], lse)
assert [str(one.message) for one in said] == ["the system starts no thread: the calling one does all work"]
"""


def test_a_process_that_gets_no_threads_computes_by_the_calling_one(tmp_path):
    pytest.importorskip("resource")
    q, k, v = arrays(29, (2, 700, 4, 32), (2, 700, 2, 32), (2, 700, 2, 32))
    out, lse = fa_attn.flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
    file = tmp_path / "in.npz"
    np.savez(file, q=q, k=k, v=v, out=out, lse=lse, dout=np.ones_like(out))
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _NO_THREADS, file]
    done = subprocess.run(command, env=alone, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this system does not limit the processes of a user")
    assert done.returncode == 0, done.stderr


_INTERPRETERS = """
import sys
try:
    import _interpreters as made
except ImportError:
    made = __import__("_xxsubinterpreters")
run = made.exec if sys.version_info >= (3, 13) else made.run_string
body = f"import sys; sys.path[:] = {sys.path!r}" + sys.argv[1]
if sys.version_info < (3, 12):
    several = [made.create()]
elif sys.version_info < (3, 13):
    several = [made.create(isolated=True), made.create(isolated=False)]
else:
    several = [made.create("isolated"), made.create("legacy")]
for interpreter in several:
    print(run(interpreter, body) or "", end="", flush=True)
made.destroy(several[-1])
exec(body)
"""
_IN_EACH = """
try:
    import fa_attn
except ImportError as error:
    assert "subinterpreters" in str(error), error
    print("refused")
else:
    try:
        fa_attn.problem(1, -1, heads=1, head_dim=8)
    except fa_attn.InputError:
        print("taken")
"""


def test_interpreters_of_one_process():
    """One with a lock of its own refuses the module by name; those that share a lock take it."""
    command = [sys.executable, "-c", _INTERPRETERS, _IN_EACH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    own = ["refused"] if sys.version_info >= (3, 12) else []
    assert done.stdout.split() == [*own, "taken", "taken"]


def test_more_threads_than_are_of_use_are_not_started():
    """A pool of a hundred thousand threads takes minutes to start."""
    code = (
        "import numpy as np, fa_attn; q = np.ones((1, 64, 2, 16), 'f'); "
        "assert fa_attn.flash_attn_func(q, q, q).sum() == 2048"
    )
    variables = {**os.environ, "RAYON_NUM_THREADS": "100000"}
    subprocess.run([sys.executable, "-c", code], env=variables, timeout=60, check=True)


@pytest.mark.parametrize("causal", [False, True])
def test_threads_compute_side_by_side(causal):
    q, k, v = arrays(25, (1, 256, 4, 64), (1, 256, 4, 64), (1, 256, 4, 64))
    want = fa_attn.flash_attn_func(q, k, v, causal=causal)
    got = [None] * 8

    def compute(i):
        got[i] = fa_attn.flash_attn_func(q, k, v, causal=causal)

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(len(got))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(out, want) for out in got)
