#!/usr/bin/env python3
"""Rows of many forms beside the peers that are installed: where we are slower.

    python bench/survey.py OUT.json [SECONDS] [seed=N] [only=TEXT]

Forms: dense layers, drawn by a seed, of head dims 64 to 256 and 192-128, few and many heads, groups and odd
lengths; cross attention on 77 to 1,500 keys; windows, soft caps, slopes, masks and biases; packed batches of
unlike lengths; decoding and chunks of prompts on caches in one piece and in pages, of 16 and 8 bits; latents
(MLA). Peers: torch's cuDNN, FlashAttention-2 and "efficient", FlashAttention-3 (fa3-fwd), FlashInfer's decode
(flashinfer-python, compiled beside the first rows) and FlashMLA (sgl-flash-mla, planned before). Each row is
checked first: the last head group of the first and the last sequence, out and gradients, against the formula
in float32; a peer whose result is wrong leaves the row. Then the contestants replay CUDA graphs in turns, and
the median counts. A process each computes some of the rows, one row at a time, so that a fault costs one
row. Prints all passes, the slowest ratio first; "fa planned" is ours with the plan of a step made before,
"fa 16 bits" ours on the codes' numbers.
"""

import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from survey_peers import compile_infer, contestants, ours, ours_16_bits, ours_planned
from survey_rows import Case, rows

NAMED = dict(word.split("=", 1) for word in sys.argv[2:] if "=" in word)
TURNS, LEAST = 5, 1e-3
BEGIN = time.time()


class Replay:
    """So many steps in a graph that a replay takes LEAST."""

    def __init__(self, run):
        self.run = run  # What it holds is read by the graph.
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        self.count = max(1, min(100, round(LEAST * 3 / (time.perf_counter() - begin))))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
            for _ in range(self.count):
                run()
        torch.cuda.synchronize()

    def seconds(self):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / self.count


def no_grad(call):
    def run():
        with torch.no_grad():
            return call()

    return run


def results_of(case, call):
    out = call()
    if not case.backward or not out.requires_grad:
        return (out,)
    return (out, *torch.autograd.grad(out, (case.q, case.k, case.v), case.dout))


def said(error):
    return f"{type(error).__name__}: {str(error)[:150]}"


def measure(case, found):
    """Seconds by pass and contestant, and why others have none."""
    want = case.formula()
    torch.cuda.synchronize()
    calls, errors, times = {}, {}, {}
    for name, of in found.items():
        try:
            call = of(case)
            if call is None:
                continue
            results = results_of(case, call)
            torch.cuda.synchronize()
            if case.is_right(results, want):
                calls[name] = call, len(results) > 1
            else:
                errors[name] = "wrong"
            del results
        except torch.AcceleratorError as error:
            raise Broken(f"{name}: {said(error)}") from error
        except Exception as error:  # noqa: BLE001 - a peer that does not compute the row
            errors[name] = said(error)
    del want
    for mode in ("fwd", "bwd") if case.backward else ("fwd",):
        replays = {}
        for name, (call, has_gradients) in calls.items():
            if mode == "bwd" and not has_gradients:
                continue
            try:
                if mode == "fwd":
                    run = no_grad(call)
                else:
                    out = call()

                    def run(out=out):
                        torch.autograd.grad(out, (case.q, case.k, case.v), case.dout, retain_graph=True)

                replays[name] = Replay(run)
                replays[name].seconds()
            except torch.AcceleratorError as error:
                raise Broken(f"{name} {mode}, replayed: {said(error)}") from error
            except Exception as error:  # noqa: BLE001 - what cannot be captured
                errors[f"{name} {mode}"] = said(error)
                replays.pop(name, None)
        own, order = {name: [] for name in replays}, list(replays)
        for _ in range(TURNS):
            random.shuffle(order)
            for name in order:
                own[name].append(replays[name].seconds())
        times[mode] = {name: statistics.median(each) for name, each in own.items()}
    return times, errors


class Broken(Exception):
    """An error after which the process cannot use its GPU."""


def warm(some):
    """Compiles our kernels of these rows, beside other processes."""
    for own in some:
        try:
            case = Case(own)
            for of in (ours, ours_planned, ours_16_bits):
                call = of(case)
                if call is not None:
                    results_of(case, call)
            torch.cuda.synchronize()
            del case
        except torch.AcceleratorError as error:
            print(f"BROKEN {own}: ours: {said(error)}", flush=True)
            os._exit(4)
        except Exception as error:  # noqa: BLE001 - the row says it again
            print(f"{own}: {said(error)}", file=sys.stderr)


def work(some, shared, out, until, infers):
    """Compiles the kernels of these rows beside other processes, then measures them alone, a line each."""
    lock, ready, workers = shared
    warm(some)
    with ready.get_lock():
        ready.value += 1
    while ready.value < workers and time.time() < until - 60:
        time.sleep(0.05)
    found, missing = contestants()
    torch.cuda.set_stream(torch.cuda.Stream())
    for own in some:
        if own.form == "paged" and infers is not None:
            while infers.value < 2 and time.time() < until - 20:
                time.sleep(0.1)
            if infers.value < 2:
                found.pop("flashinfer", None)
        with lock:
            if time.time() > until:
                return
            line, broken = {"row": str(own), "missing": missing}, False
            try:
                line["seconds"], line["errors"] = measure(Case(own), found)
            except (Broken, torch.AcceleratorError) as error:
                line["errors"], broken = {"row": said(error)}, True
            except Exception as error:  # noqa: BLE001 - other rows go on
                line["errors"] = {"row": said(error)}
            with open(out + ".lines", "a") as file:
                file.write(json.dumps(line) + "\n")
            if not broken:
                torch.cuda.empty_cache()
        if broken:
            print(f"BROKEN {own}: {line['errors']['row']}", flush=True)
            os._exit(3)


def table_of(measured):
    """Lines of passes, the slowest ratio first, and the ratios."""
    table = []
    for each in measured:
        for mode, times in each.get("seconds", {}).items():
            mine = times.get("fa")
            peers = {name: value for name, value in times.items() if name.split()[0] != "fa"}
            best = min(peers, key=peers.get) if peers else None
            ratio = peers[best] / mine if best and mine else None
            more = "".join(f", {name} {times[name] * 1e6:.1f}" for name in times if name.startswith("fa "))
            shown = f"{ratio:.3f} of {best} {peers[best] * 1e6:.1f} us" if ratio else "no peer"
            mine = f"{mine * 1e6:9.1f} us" if mine else "   failed"
            table.append((ratio or 99, f"{each['row']:54} {mode} {mine} {shown}{more}"))
    table.sort()
    return [line for _, line in table], [ratio for ratio, _ in table if ratio != 99]


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else "survey.json"
    until = BEGIN + float(next((x for x in sys.argv[2:] if "=" not in x), 120))
    some = rows(NAMED.get("seed", "1"), NAMED.get("only", ""))
    Path(out + ".lines").write_text("")
    spawn = multiprocessing.get_context("spawn")
    infers = spawn.Value("i", 0) if any(Path(folder, "flashinfer").is_dir() for folder in sys.path) else None
    targets = (False, True) if infers is not None else ()
    compiling = [spawn.Process(target=compile_infer, args=(codes, infers)) for codes in targets]
    for process in compiling:
        process.start()
    # Rows that FlashInfer computes come last, from processes of their own.
    workers = max(2, min(12, (os.cpu_count() or 4) - 2))
    paged = [own for own in some if own.form == "paged"]
    others = [own for own in some if own.form != "paged"]
    parts = [others[at :: workers - 2] for at in range(workers - 2)] + [paged[at::2] for at in range(2)]
    parts = [part for part in parts if part]
    shared = spawn.Lock(), spawn.Value("i", 0), len(parts)

    def started(part):
        process = spawn.Process(target=work, args=(part, shared, out, until, infers))
        process.start()
        return process

    running = [(started(part), part) for part in parts]

    def lines():
        return [json.loads(line) for line in Path(out + ".lines").read_text().splitlines()]

    while running:
        process, part = running.pop(0)
        process.join()
        done = {line["row"] for line in lines()}
        left = [own for own in part if str(own) not in done]
        if process.exitcode == 3 and left and time.time() < until - 10:
            running.append((started(left), left))
    for process in compiling:
        process.kill()
    measured = lines()
    missing = {name: why for each in measured for name, why in each.pop("missing").items()}
    done = {each["row"] for each in measured}
    if len(done) < len(some):
        missing["rows"] = "; ".join(str(own) for own in some if str(own) not in done)
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": measured,
        "missing": missing,
    }
    Path(out).write_text(json.dumps(report, indent=1))
    shown, ratios = table_of(measured)
    print("\n".join(shown))
    if ratios:
        print(
            f"{len(ratios)} passes with a peer: {statistics.geometric_mean(ratios):.3f} of the best, "
            f"{sum(ratio < 1 for ratio in ratios)} below 1"
        )
    for each in measured:
        for name, why in each["errors"].items():
            if name.split()[0] in ("fa", "row"):
                print(f"{each['row']}: {name}: {why}")
    for name, why in missing.items():
        print(f"without {name}: {why}")
    print(f"{time.time() - BEGIN:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
