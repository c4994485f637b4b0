#!/usr/bin/env python3
"""Rates of two builds of `fa` beside each other on one GPU, row by row.

    python bench/beside.py OLD NEW OUT.json [--seconds 140] [--lists sm90,sm90-bwd,..] [--again 8] [--reps 24]

Both programs measure the same marks, in processes of their own of which one is stopped (SIGSTOP) while the
other measures a row; which of them is first changes from row to row, so that clocks and power limits favour
neither. Rows below 0.97 are measured again as often as `--again` and the time allow, and the middle ratio
counts. Prints the geometric mean and the lowest ratio of each list; rows that only one of the programs has
are listed.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_LEAST = 0.97


class Program:
    """A build that measures marks, and stands still while it is not its turn."""

    def __init__(self, path, arguments, folder, name):
        self.file, self.said = folder / f"{name}.json", folder / f"{name}.txt"
        cache = folder.parent / f"kernels-{name}"
        cache.mkdir(mode=0o700, exist_ok=True)
        environment = {**os.environ, "FA_CACHE_DIR": str(cache)}
        command = [path, "bench", *arguments, "--json", str(self.file)]
        with self.said.open("w") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        self.process.send_signal(signal.SIGSTOP)
        self.stamp = None

    def ended(self):
        return self.process.poll() is not None

    def turn(self, until):
        """Lets it measure until it has written another report, or has ended; whether it has ended."""
        self.process.send_signal(signal.SIGCONT)
        while not self.ended():
            if self._stamp() != self.stamp:
                self.process.send_signal(signal.SIGSTOP)
                self.stamp = self._stamp()
                return False
            if time.monotonic() > until:
                self.process.kill()
                self.process.wait()
                return True
            time.sleep(0.002)
        return True

    def _stamp(self):
        try:
            found = self.file.stat()
        except FileNotFoundError:
            return None
        return (found.st_ino, found.st_mtime_ns) if found.st_size else None

    def rows(self):
        """Rates and kernels by what was measured, named as `--filter` finds it."""
        try:
            report = json.loads(self.file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            print(self.said.read_text()[-2000:], file=sys.stderr)
            return {}
        found = {}
        for row in report["rows"]:
            if row.get("error") is not None:
                print(f"{self.file.stem}: {label(row)}: {row['error']}", file=sys.stderr)
                continue
            key = (row["kind"], row.get("name"), row.get("group"), row.get("dtype"), label(row))
            count = sum(known[:5] == key for known in found)
            found[*key, count] = (row.get("rate") or 1 / row["ms_median"], row["spec"])
        return found


def label(row):
    """The end of a row's label in `fa bench --filter`."""

    def pair(first, second, between):
        return str(first) if first == second else f"{first}{between}{second}"

    seqlens = pair(row["seqlen_q"], row["seqlen_k"], "x")
    heads = pair(row["heads_q"], row["heads_kv"], ":")
    head_dims = pair(row["head_dim"], row["head_dim_v"], "-") + " latent" * row.get("latent", False)
    return f"{row['batch']} x {seqlens}, {heads}, hd {head_dims}, {row['mask']}"


def measured(programs, arguments, first, until):
    """What both programs found, in turns."""
    with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
        both = [Program(path, arguments, Path(folder), name) for path, name in zip(programs, ("old", "new"))]
        left = list(both)
        row = first
        while left:
            order = left if row % 2 == 0 else left[::-1]
            left = [own for own in order if not own.turn(until)]
            left.sort(key=both.index)
            row += 1
        return [own.rows() for own in both]


def summary(name, ratios):
    if not ratios:
        return f"{name}: no row"
    mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
    lowest = min(ratios, key=ratios.get)
    low = sum(ratio < _LEAST for ratio in ratios.values())
    found = f"geometric mean {mean:.4f}, lowest {ratios[lowest]:.3f}, {low} below {_LEAST}"
    return f"{name}: {len(ratios)} rows, {found}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--lists", default="sm90,sm90-bwd,sm80,sm80-bwd,decode")
    parser.add_argument("--again", type=int, default=8, help="most rows of a list to measure again")
    parser.add_argument("--reps", type=int, default=24)
    parser.add_argument("--arguments", help="measure these arguments of fa bench instead of lists")
    asked = parser.parse_args()
    begin = time.monotonic()
    until = begin + asked.seconds
    lists = {}
    for name in asked.lists.split(","):
        mode = "bwd" if name.endswith("bwd") else "fwd"
        lists[name] = ["--backend", "cuda", "--marks", name, "--mode", mode, "--reps", str(asked.reps)]
    if asked.arguments:
        lists = {"arguments": asked.arguments.split()}
    programs = [str(Path(path).resolve()) for path in (asked.old, asked.new)]
    report, everything = {"old": asked.old, "new": asked.new, "lists": {}}, {}
    for name, arguments in lists.items():
        if time.monotonic() > until - 5:
            print(f"{name}: no time left")
            continue
        old, new = measured(programs, arguments, 0, until)
        tries = {row: [new[row][0] / own[0]] for row, own in old.items() if row in new}
        alone = sorted(str(row) for row in set(old) ^ set(new))
        for turn in range(1, 4):
            low = [row for row in sorted(tries, key=lambda row: tries[row]) if _middle(tries[row]) < _LEAST]
            for wanted in dict.fromkeys(row[4] for row in low[: asked.again]):
                if asked.arguments or time.monotonic() > until - 10:
                    break
                before, after = measured(programs, [*arguments, "--filter", wanted], turn, until)
                for row in set(before) & set(after) & set(tries):
                    tries[row].append(after[row][0] / before[row][0])
        ratios = {row: _middle(own) for row, own in tries.items()}
        everything.update({(name, *row): ratio for row, ratio in ratios.items()})
        rows = [
            {"row": row, "ratio": ratios[row], "tries": own, "old": old[row], "new": new[row]}
            for row, own in tries.items()
        ]
        report["lists"][name] = {"rows": rows, "alone": alone}
        print(summary(name, ratios), f"[{time.monotonic() - begin:.0f} s]", flush=True)
        for row in sorted(ratios, key=ratios.get)[:4]:
            kernels = [old[row][1], new[row][1]]
            same = "same kernel" if kernels[0] == kernels[1] else " -> ".join(kernels)
            print(f"    {ratios[row]:.3f} ({len(tries[row])} tries) {row[3]} {row[4]}: {same}")
        if alone:
            print(f"    {len(alone)} rows of one program alone, as {alone[0]}")
        asked.out.write_text(json.dumps(report, indent=1))
    print(summary("all", everything))


_middle = statistics.median
_FOLDER = Path(tempfile.mkdtemp(prefix="fa-beside-"))

if __name__ == "__main__":
    main()
