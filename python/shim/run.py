#!/usr/bin/env python3
"""Runs FlashAttention's own tests on this package, through the packages beside this file that stand in for
theirs.

    git clone https://github.com/Dao-AILab/flash-attention COPY   # their files are read and not changed
    python python/shim/run.py COPY --suite fa2 fa3 fa4 --cases 60 --limit 150 --jobs 8 --record record.json

From each test function, a number of cases is drawn from the product of its parameters, by a seed; processes
share them. A case passes, fails, is left out for a named reason (what the package refuses), or is skipped by
the test itself; what the time limit cuts off is counted. Exit status 1 where a case fails.
"""

import argparse
import collections
import contextlib
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

SHIM = pathlib.Path(__file__).resolve().parent

SUITES = {
    "fa2": ("tests", "test_flash_attn", {}),
    "fa3": ("hopper", "test_flash_attn", {}),
    # The same gradients a thousand times.
    "fa3-determinism": ("hopper", "test_flash_attn_bwd_determinism", {}),
    "fa3-compile": ("hopper", "test_torch_compile_and_export", {}),
    "fa4": ("tests/cute", "test_flash_attn", {}),
    "fa4-fast": ("tests/cute", "test_flash_attn_fast", {}),
    "fa4-varlen": ("tests/cute", "test_flash_attn_varlen", {}),
    "fa4-combine": ("tests/cute", "test_flash_attn_combine", {}),
    "fa4-race": ("tests/cute", "test_flash_attn_race_condition", {}),
}

# Tests of what stands beside the kernels.
LEFT_OUT = {
    "test_flash3_bw_compatibility": "the schema of their operators",
    "test_flash_attn_cache_separates_broadcast_layouts": "their cache of compiled kernels",
    "test_flash_attn_varlen_cumsum_metadata_paths": "their scheduler's metadata",
    "test_flash_attn_generator_arg_must_be_none": "their extension's arguments",
    "test_flash_attn_varlen_paged_kv_num_splits": "their internal function",
    # Lengths on the device are never read on the host.
    "test_flash_attn_kvcache_paged_block_table_bounds": "a host's check of lengths on the device",
    "test_flash_attn_invalid_head_dim": "their refusal of head dims",
    "test_flash_attn_varlen_tensor_max_seqlen_reuses_fwd_cache": "their cache of compiled kernels",
    "test_splitkv_forwards_explicit_arch": "their internal function",
    "test_flash_attn_combine_dynamic_splits_and_semaphore": "their internal function",
    "test_compile_and_package_model": "a C++ compiler's run of minutes",
}


# They fill the GPU's memory, and run where no other process does (--jobs 1).
ALONE = {("fa3", "test_flash_attn_race_condition")}


def cases_of(function):
    """(how many cases there are, what makes the i-th), by the marks of pytest; a reason where none is to be
    run."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "skipif" and mark.args and mark.args[0]:
            return 0, None, "skipped by the test"
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            axes.append((names, list(values)))
    count = 1
    for _, values in axes:
        count *= len(values)

    def make(index):
        arguments = {}
        for names, values in axes:
            index, at = divmod(index, len(values))
            value = values[at]
            if type(value).__name__ == "ParameterSet":
                row = value.values
            else:
                row = value if len(names) > 1 else (value,)
            arguments.update(zip(names, row))
        return arguments

    return count, make, None


def reason_of(error):
    """The reason of a refusal: its first words."""
    text = str(error)
    for mark in (" = ", ":", ","):
        text = text.split(mark)[0]
    return text.strip()[:60]


def run_case(function, arguments):
    """(outcome, detail)."""
    import _pytest.outcomes
    import torch

    import fa_attn

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            function(**arguments)
        return "passed", ""
    except fa_attn.UnsupportedError as error:
        return "left out", reason_of(error)
    except (_pytest.outcomes.Skipped, _pytest.outcomes.XFailed) as error:
        return "skipped by the test", str(error)[:80]
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "left out", "out of memory"
    except (Exception, _pytest.outcomes.OutcomeException) as error:  # whatever a test raises is its failure
        if "CUBLAS_STATUS_ALLOC_FAILED" in str(error):
            return "left out", "out of memory"
        lines = str(error).strip().splitlines() or [""]
        return "failed", f"{type(error).__name__}: {lines[0][:300]}"


def tests_of(suite, copy):
    """The test functions of a suite, by name."""
    folder, module, _ = SUITES[suite]
    # Behind the packages of this folder: beside FlashAttention-3's tests lies its own interface.
    sys.path[1:1] = [str(copy / folder)]
    try:
        spec = importlib.util.spec_from_file_location(f"{suite}_{module}", copy / folder / f"{module}.py")
        tests = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tests)
    finally:
        sys.path.remove(str(copy / folder))
    return {name: f for name, f in sorted(vars(tests).items()) if name.startswith("test_") and callable(f)}


def work_of(arguments):
    """Roughly how long a case takes, by the arguments that tests use for lengths."""
    longest = [arguments.get(name, 1) for name in ("seqlen_q", "seqlen_k", "seqlen", "max_seq_len", "d")]
    work = 1
    for value in longest:
        work *= max(value, 1) if isinstance(value, int) else 1
    return work


def drawn_of(suites, options):
    """(cases, functions): each case (suite, name, index, function, what makes its arguments), each function
    what its line in the record begins with."""
    drawn, functions = [], []
    for suite in suites:
        for name, function in tests_of(suite, options.copy).items():
            count, make, why = cases_of(function)
            why = LEFT_OUT.get(name, why)
            if options.jobs > 1 and (suite, name) in ALONE:
                why = "it fills the GPU's memory"
            picks = []
            if why is None:
                rng = random.Random(f"{options.seed} {name}")
                picks = rng.sample(range(count), min(count, options.cases * options.small))
                if options.small > 1:
                    picks = sorted(picks, key=lambda index: work_of(make(index)))[: options.cases]
            line = {"suite": suite, "function": name, "cases": count, "why": why, "drawn": len(picks)}
            functions.append(line)
            drawn += [(place, suite, name, index, function, make) for place, index in enumerate(picks)]
    # Functions take turns, so that a time limit cuts off a part of each.
    drawn.sort(key=lambda case: case[:3])
    return [case[1:] for case in drawn], functions


def use_their_padding(copy):
    """Their helper that packs rows, as their tests unpack its results: four in versions before 2.7, then
    five."""
    file = copy / "flash_attn" / "bert_padding.py"
    if file.is_file():
        spec = importlib.util.spec_from_file_location("flash_attn.bert_padding", file)
        padding = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(padding)
        sys.modules[spec.name] = padding


def use_their_interface(copy):
    """FlashAttention-3's functions with the arguments and results that its tests of this version know."""
    file = copy / "hopper" / "flash_attn_interface.py"
    theirs = file.read_text() if file.is_file() else ""
    if "sink_token_length" in theirs:
        name = "flash_attn_interface_2_7"
    elif "\n        return out, softmax_lse\n" in theirs:
        name = "flash_attn_interface_2_8"
    else:
        return
    sys.modules["flash_attn_interface"] = importlib.import_module(name)


def work(options, turn, share):
    """Runs cases, the next that no other process has taken, and prints a line for each."""
    sys.path.insert(0, str(SHIM))
    import torch

    if not torch.cuda.is_available():
        importlib.import_module("on_cpu").begin()
    use_their_padding(options.copy)
    use_their_interface(options.copy)
    drawn, functions = drawn_of(options.suite, options)
    if share == 0:
        for line in functions:
            print(json.dumps(line), flush=True)
    while time.time() < options.until:
        with turn.get_lock():
            at, turn.value = turn.value, turn.value + 1
        if at >= len(drawn):
            break
        suite, name, index, function, make = drawn[at]
        line = {"suite": suite, "function": name, "index": index}
        # Read where the process does not outlive the case.
        print(json.dumps({**line, "outcome": "begun"}), flush=True)
        begin = time.time()
        outcome, detail = run_case(function, make(index))
        line.update(outcome=outcome, detail=detail, seconds=round(time.time() - begin, 2))
        if outcome == "failed":
            line["arguments"] = {key: str(value) for key, value in make(index).items()}
        print(json.dumps(line), flush=True)


def worker(options, turn, share, out, err):
    """The body of a worker process, which was forked with torch loaded but without a GPU context."""
    for target, stream in ((out, 1), (err, 2)):
        os.dup2(target.fileno(), stream)
    status = 1
    try:
        work(options, turn, share)
        status = 0
    except BaseException:  # noqa: B036 - the record says what ended it
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch's own may still run, which would end the process by an error.
    os._exit(status)


def commit_of(copy):
    """The commit of a clone, or the one that a file COMMIT names."""
    marker = copy / "COMMIT"
    if marker.is_file():
        return marker.read_text().strip()
    if not (copy / ".git").exists():
        return "unknown"
    found = subprocess.run(["git", "-C", str(copy), "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def run(options):
    """The records of the suites, by name."""
    for suite in options.suite:
        os.environ.update(SUITES[suite][2])
    os.environ["FA_PEER_COPY"] = str(options.copy)
    # What takes long to import is imported once.
    for module in ("torch", "numpy", "einops", "pytest", "fa_attn.torch"):
        importlib.import_module(module)
    turn = multiprocessing.Value("q", 0)
    jobs = []
    for share in range(options.jobs):
        out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            worker(options, turn, share, out, err)
        jobs.append((pid, out, err))
    records = {name: {"functions": {}, "failures": [], "ended": [], "seconds": 0.0} for name in options.suite}
    for pid, out, err in jobs:
        ended = wait(pid, options.until + 45)
        out.seek(0)
        begun = None
        for line in map(json.loads, filter(str.strip, out)):
            record = records[line["suite"]]
            found = record["functions"].setdefault(line["function"], collections.Counter())
            if "cases" in line:
                found["cases"] = line["cases"]
                found["cut off"] += line["drawn"]
                if line["why"]:
                    found[f"left out: {line['why']}"] = line["cases"]
                continue
            outcome = line["outcome"]
            if outcome == "begun":
                begun = line
                continue
            begun = None
            found["cut off"] -= 1
            record["seconds"] += line["seconds"]
            found[f"left out: {line['detail']}" if outcome == "left out" else outcome] += 1
            if outcome == "failed":
                record["failures"].append(line)
        if ended:
            err.seek(0)
            name = begun["suite"] if begun else options.suite[0]
            during = f" in {begun['function']} {begun['index']}" if begun else ""
            records[name]["ended"].append(f"{ended}{during}: {err.read().strip()[-600:]}")
    for record in records.values():
        functions = sorted(record["functions"].items())
        record["functions"] = {key: dict(+found) for key, found in functions}
        record["total"] = dict(sum((found for _, found in functions), collections.Counter()))
        record["seconds"] = round(record["seconds"], 1)
    return records


def wait(pid, until):
    """What ended a process other than its work, or nothing."""
    while time.time() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return None if status == 0 else f"status {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "killed behind the time limit"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("copy", type=pathlib.Path, help="a copy of Dao-AILab/flash-attention")
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--cases", type=int, default=40, help="cases drawn of each test function")
    parser.add_argument(
        "--small", type=int, default=1, help="draw so many times as many, and run the shortest (for a CPU)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120, help="seconds for all suites together")
    parser.add_argument("--jobs", type=int, default=8, help="processes")
    parser.add_argument("--record", type=pathlib.Path, help="write the record, as JSON")
    options = parser.parse_args()
    options.copy = options.copy.resolve()
    options.until = time.time() + options.limit
    suites = run(options)
    import torch

    import fa_attn

    record = {
        "repository": "Dao-AILab/flash-attention",
        "commit": commit_of(options.copy),
        "fa_attn": fa_attn.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "seed": options.seed,
        "cases_of_a_function": options.cases,
        "drawn_for_a_case": options.small,
        "settings": {name: SUITES[name][2] for name in options.suite if SUITES[name][2]},
        "suites": suites,
    }
    failed = 0
    for name, found in suites.items():
        failed += len(found["failures"]) + len(found["ended"])
        counts = ", ".join(f"{key} {value}" for key, value in sorted(found["total"].items()))
        print(f"{name}: {counts}; {found['seconds']} s in all processes", flush=True)
        for line in itertools.islice(found["failures"], 12):
            print(f"  failed {line['function']} {line['arguments']}: {line['detail']}")
        for text in found["ended"]:
            print(f"  a process ended: {text}")
    if options.record:
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
