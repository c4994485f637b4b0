#!/usr/bin/env python3
"""Runs FlashAttention's own tests on this package, through the packages beside this file that stand in for
theirs.

    git clone https://github.com/Dao-AILab/flash-attention COPY        # their files are read there and not
    changed python python/shim/run.py COPY --suite fa2 fa3 fa4 --cases 60 --limit 150 --jobs 8 --record
    record.json

Of each test function so many cases are drawn from the product of its parameters, by a seed; processes share
them. A case passes, fails, is left out for a named reason (what the package refuses), or is skipped by the
test itself; what the time limit cuts off is counted. Exit status 1 where a case fails.
"""

import argparse
import collections
import contextlib
import importlib
import io
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

SHIM = pathlib.Path(__file__).resolve().parent

SUITES = {
    "fa2": ("tests", "test_flash_attn", {}),
    # Chunks are drawn inside of every case that has windows, so that all of them would be left out.
    "fa3": ("hopper", "test_flash_attn", {"FLASH_ATTENTION_DISABLE_LOCAL": "TRUE"}),
    "fa4": ("tests/cute", "test_flash_attn", {}),
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
}


# They fill the GPU's memory, and run where no other process does (--jobs 1).
ALONE = {("fa3", "test_flash_attn_race_condition")}


def cases_of(function):
    """(how many there are, what makes the i-th), by the marks of pytest; a reason where none is to run."""
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
    """What a refusal is about: its first words."""
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
        lines = str(error).strip().splitlines() or [""]
        return "failed", f"{type(error).__name__}: {lines[0][:300]}"


def work(options):
    """Runs this process's share of a suite's cases and prints a line for each."""
    folder, module, _ = SUITES[options.worker]
    sys.path[:0] = [str(SHIM), str(options.copy / folder)]
    tests = importlib.import_module(module)
    functions = {name: f for name, f in vars(tests).items() if name.startswith("test_") and callable(f)}
    drawn = []
    for name, function in sorted(functions.items()):
        count, make, why = cases_of(function)
        why = LEFT_OUT.get(name, why)
        if options.jobs > 1 and (options.worker, name) in ALONE:
            why = "it fills the GPU's memory"
        if options.share == 0:
            print(json.dumps({"function": name, "cases": count, "why": why}), flush=True)
        if why is None:
            rng = random.Random(f"{options.seed} {name}")
            picks = rng.sample(range(count), min(count, options.cases))
            drawn += [(place, name, index, make) for place, index in enumerate(picks)]
    # Functions take turns, so that a time limit cuts off a part of each.
    drawn.sort(key=lambda case: (case[0], case[1]))
    for turn, (_, name, index, make) in enumerate(drawn):
        if turn % options.jobs != options.share:
            continue
        if time.time() > options.until:
            outcome, detail = "cut off", ""
        else:
            outcome, detail = run_case(functions[name], make(index))
        line = {"function": name, "index": index, "outcome": outcome, "detail": detail}
        if outcome == "failed":
            line["arguments"] = {key: str(value) for key, value in make(index).items()}
        print(json.dumps(line), flush=True)


def commit_of(copy):
    """Of a clone, or as a file COMMIT says."""
    marker = copy / "COMMIT"
    if marker.is_file():
        return marker.read_text().strip()
    if not (copy / ".git").exists():
        return "unknown"
    found = subprocess.run(["git", "-C", str(copy), "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def suite(name, options):
    """The record of a suite."""
    environment = {**os.environ, **SUITES[name][2], "FA_PEER_COPY": str(options.copy)}
    until = time.time() + options.limit
    jobs = []
    for share in range(options.jobs):
        command = [sys.executable, __file__, str(options.copy), "--worker", name, "--share", str(share)]
        command += ["--jobs", str(options.jobs), "--cases", str(options.cases), "--seed", str(options.seed)]
        command += ["--until", str(until)]
        out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        jobs.append((subprocess.Popen(command, stdout=out, stderr=err, env=environment), out, err))
    functions, failures, ended = {}, [], []
    for process, out, err in jobs:
        try:
            process.wait(timeout=max(1.0, until + 45 - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            ended.append("killed behind the time limit")
        if process.returncode not in (0, None, -9):
            err.seek(0)
            ended.append(err.read().strip()[-600:])
        out.seek(0)
        for line in map(json.loads, filter(str.strip, out)):
            found = functions.setdefault(line["function"], collections.Counter())
            if "cases" in line:
                found["cases"] = line["cases"]
                if line["why"]:
                    found[f"left out: {line['why']}"] = line["cases"]
                continue
            outcome = line["outcome"]
            found[f"left out: {line['detail']}" if outcome == "left out" else outcome] += 1
            if outcome == "failed":
                failures.append(line)
    total = sum(functions.values(), collections.Counter())
    return {
        "functions": {key: dict(value) for key, value in sorted(functions.items())},
        "total": dict(total),
        "failures": failures,
        "ended": ended,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("copy", type=pathlib.Path, help="a copy of Dao-AILab/flash-attention")
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--cases", type=int, default=40, help="cases drawn of each test function")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120, help="seconds for each suite")
    parser.add_argument("--jobs", type=int, default=8, help="processes")
    parser.add_argument("--record", type=pathlib.Path, help="write the record, as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.copy = options.copy.resolve()
    if options.worker:
        work(options)
        # Threads of torch's own may still run, which would end the process by an error.
        os._exit(0)
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
        "suites": {},
    }
    failed = 0
    for name in options.suite:
        found = record["suites"][name] = suite(name, options)
        failed += len(found["failures"]) + len(found["ended"])
        counts = ", ".join(f"{key} {value}" for key, value in sorted(found["total"].items()))
        print(f"{name}: {counts}", flush=True)
        for line in itertools.islice(found["failures"], 12):
            print(f"  failed {line['function']} {line['arguments']}: {line['detail']}")
        for text in found["ended"]:
            print(f"  a process ended: {text}")
    if options.record:
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
