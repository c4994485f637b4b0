#!/usr/bin/env python3
"""Small random models of all of transformers' model types, by eager attention and by this package's: their
outputs with and without padding, packed sequences, generation from caches, and a training step.

    pip install torch transformers && python python/tests/sweep_transformers.py [--only llama,bert] \
        [--forms full,left] [--device cuda] [--results FILE] [--write docs/transformers-models.md]

Ends with 1 where a result differs from eager's, or a model fails that does not with eager attention.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import sweep_models as models  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from sweep_forms import Given, Without, build, difference, kinds_of, reason_of  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: E402

import fa_attn.transformers  # noqa: E402

FORMS = "full left right packed cached train".split()
EQUAL, REFUSED, WRONG, ERROR = "equal", "refused", "wrong", "error"
NOT, NONE = "not comparable", "no such form"
MEMORY = 8 << 30
SIGNS = {EQUAL: "=", REFUSED: "r", WRONG: "WRONG", ERROR: "ERROR", NOT: "n", NONE: ""}


class Calls:
    """This package's attention, and how often it was called."""

    count = 0

    def __init__(self):
        self.name = fa_attn.transformers.register()
        self.inner = ALL_ATTENTION_FUNCTIONS[self.name]
        ALL_ATTENTION_FUNCTIONS.register(self.name, self)

    def __call__(self, *args, **options):
        Calls.count += 1
        return self.inner(*args, **options)


class Sweep:
    def __init__(self, args):
        self.device = args.device
        self.dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        self.limit = 1e-4 if args.device == "cpu" else 5e-2
        self.forms = args.forms
        self.debug = args.debug

    def made(self, kind, by, how, seed):
        return build(kind, by, self.device, self.dtype, *how, seed)

    def comparable(self, kind):
        """An eager model and inputs on which it computes finite numbers: (model, given, how)."""
        first = None
        for level in models.LEVELS:
            for std in (models.STD, 0.05, None):
                try:
                    eager = self.made(kind, "eager", (level, std), 1)
                    tries = list(models.inputs_of(kind, eager, eager.config))
                except Exception as error:
                    self.shown(error)
                    first = first or error
                    break
                for inputs in tries:
                    given = Given(inputs, self.device, self.dtype)
                    try:
                        made = given.full(eager)
                    except Exception as error:
                        self.shown(error, inputs)
                        first = first or error
                        continue
                    if made and not any(x.isnan().any() for x in made.values()):
                        return eager, given, (level, std)
                    first = first or ValueError("no finite output")
                    break
                else:
                    break
        raise first or ValueError("no inputs known")

    def shown(self, error, inputs=None):
        if self.debug:
            print({k: getattr(v, "shape", v) for k, v in (inputs or {}).items()})
            traceback.print_exception(error, limit=-3)

    def model(self, kind):
        """A model type's class, what it was given, and {form: (verdict, detail)}."""
        result = dict(kind=kind, cls="", inputs="")
        try:
            result["cls"] = models.class_of(kind).__name__
            if not models.has_attention(kind):
                return {**result, "forms": self.all_of(NOT, "no attention")}
            eager, given, how = self.comparable(kind)
        except Exception as error:
            what = "eager" if result["cls"] else "no class"
            return {**result, "forms": self.all_of(NOT, f"{what}: {reason_of(error)}")}
        result["inputs"] = kinds_of(given.inputs)
        Calls.count, ours, forms = 0, None, {}
        try:
            ours = self.made(kind, Calls.instance.name, how, 1)
        except Exception as error:
            self.shown(error)
            refusal = self.failure(error)
        for form in self.forms:
            forms[form] = self.verdict(kind, form, given, eager, ours or refusal, how)
            if form == "full" and not Calls.count and forms[form][0] in (EQUAL, WRONG):
                detail = "attention does not go through transformers' interface"
                return {**result, "forms": self.all_of(NOT, detail)}
        return {**result, "forms": forms}

    def all_of(self, verdict, detail):
        return {form: (verdict, detail) for form in self.forms}

    @staticmethod
    def failure(error):
        if type(error).__module__.startswith("fa_attn"):
            return REFUSED, reason_of(error)
        place = traceback.extract_tb(error.__traceback__)[-1]
        return ERROR, f"{reason_of(error)} ({pathlib.Path(place.filename).name}:{place.lineno})"

    def verdict(self, kind, form, given, eager, ours, how):
        """Of a form by a model, or by the verdict on that it cannot be made."""
        try:
            wanted = given.wanted(form, eager)
        except Without:
            return NONE, ""
        except Exception as error:
            self.shown(error)
            return NOT, f"eager: {reason_of(error)}"
        if not wanted or all(x.isnan().any() for x in wanted.values()):
            return NOT, "eager: no finite output"
        if isinstance(ours, tuple):
            return ours
        try:
            made = given.made(form, ours)
        except Exception as error:
            self.shown(error)
            failure = self.failure(error)
            if form == "packed" and failure[0] == ERROR:
                try:
                    given.packed(eager)
                except Exception:
                    return NOT, f"eager: {reason_of(error)}"
            return failure
        off, where = difference(wanted, made, self.limit)
        if off <= self.limit:
            return EQUAL, f"{off:.0e}"
        reason = self.excuse(kind, form, given, eager, made, wanted, how, off)
        if reason:
            return NOT, reason
        # What experts are chosen by may be as large for two of them, with some weights.
        for seed in (2, 3):
            one, other = (self.made(kind, by, how, seed) for by in ("eager", Calls.instance.name))
            again = difference(given.wanted(form, one), given.made(form, other), self.limit)[0]
            if again <= self.limit:
                return EQUAL, f"{again:.0e}; {off:.1e} in {where} with other weights"
        return WRONG, f"{off:.1e} in {where}"

    def by_sdpa(self, kind, form, given, made, how):
        """How far what sdpa makes of the masks and arrays that this package is called with is from it, also
        of models that take no sdpa by name. Eager attention adds a mask of bools as numbers, sdpa hides by
        it."""
        calls = Calls.instance
        ours, calls.inner = calls.inner, ALL_ATTENTION_FUNCTIONS["sdpa"]
        try:
            other = given.made(form, self.made(kind, calls.name, how, 1))
        except Exception:
            return float("inf")
        finally:
            calls.inner = ours
        return difference(other, made, self.limit)[0]

    def excuse(self, kind, form, given, eager, made, wanted, how, off):
        """Why a difference is not one of attention; empty where it is."""
        if form == "packed" and difference(given.packed(eager), made, self.limit)[0] <= self.limit:
            return "eager does not separate packed sequences"
        if form in ("left", "right"):
            one, other = (given.padded(eager, form, content) for content in (7, 11))
            if difference(one, other, self.limit)[0] > self.limit / 10:
                return "what is padding changes other rows by eager, too"
        if difference(wanted, given.wanted(form, eager), self.limit)[0] > self.limit:
            return "eager differs from itself"
        try:
            other = given.made(form, self.made(kind, "sdpa", how, 1))
        except Exception:
            other = {}
        if other and difference(other, made, self.limit)[0] <= self.limit:
            return "transformers' own sdpa differs from eager in the same way"
        if self.by_sdpa(kind, form, given, made, how) < off / 10:
            return "transformers' own sdpa on these masks differs from eager in the same way"
        noisy = self.made(kind, "eager", how, 1)
        with torch.no_grad():
            for parameter in noisy.parameters():
                if parameter.is_floating_point():
                    parameter.mul_(1 + 2 * torch.finfo(self.dtype).eps * torch.randn_like(parameter))
        spread = difference(wanted, given.wanted(form, noisy), self.limit)[0]
        return f"rounding alone makes a difference of {spread:.0e}" if off < 10 * spread else ""


def child(sweep, kind, path):
    if not sweep.debug:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
    if sweep.device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    began = time.time()
    result = {**sweep.model(kind), "seconds": time.time() - began}
    pathlib.Path(path).write_text(json.dumps(result))


def run(sweep, kinds, jobs, timeout):
    """The result of each model type, by a process of its own."""
    running, waiting = {}, list(kinds)[::-1]
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                kind = waiting.pop()
                path = pathlib.Path(folder, kind)
                pid = os.fork()
                if not pid:
                    code = 1
                    try:
                        child(sweep, kind, path)
                        code = 0
                    finally:
                        os._exit(code)
                running[pid] = (kind, path, time.time())
            time.sleep(0.02)
            for pid, (kind, path, began) in list(running.items()):
                late = time.time() - began > timeout
                if late:
                    os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
                if not ended:
                    continue
                del running[pid]
                if path.exists() and not late:
                    yield json.loads(path.read_text())
                    continue
                why = f"more than {timeout} s" if late else f"its process ended with {status}"
                yield dict(kind=kind, cls="", inputs="", forms=sweep.all_of(NOT, why), seconds=timeout)


def verdict_of(forms):
    """The verdict of a model by those of its forms."""
    found = {verdict for verdict, _ in forms.values()}
    for verdict in (WRONG, ERROR, EQUAL, REFUSED):
        if verdict in found:
            return verdict
    return NOT


def summary(done):
    by_model = collections.Counter(verdict_of(x["forms"]) for x in done.values())
    by_form = collections.Counter(verdict for x in done.values() for verdict, _ in x["forms"].values())
    order = (EQUAL, REFUSED, WRONG, ERROR, NOT)
    models_, forms = (", ".join(f"{by[x]} {x}" for x in order) for by in (by_model, by_form))
    return f"{len(done)} model types: {models_}; forms: {forms}"


MARKS = ("<!-- begin: sweep_transformers.py -->", "<!-- end: sweep_transformers.py -->")


def table(done, device):
    lines = [f"{summary(done)}. transformers {transformers.__version__}, {device}.", ""]
    heads = ["model type", "class", "inputs", *FORMS]
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    others = {REFUSED: collections.defaultdict(list), NOT: collections.defaultdict(list)}
    for kind, one in sorted(done.items()):
        verdict = verdict_of(one["forms"])
        if verdict in others:
            detail = next(detail for found, detail in one["forms"].values() if found == verdict)
            others[verdict][short(detail)].append(kind)
        else:
            signs = [SIGNS[one["forms"].get(form, (NONE, ""))[0]] for form in FORMS]
            lines.append(f"| {kind} | {one['cls']} | {one['inputs']} | " + " | ".join(signs) + " |")
    for verdict, title in ((REFUSED, "Refused in every form"), (NOT, "Not compared")):
        lines += ["", f"{title}:", ""]
        lines += [f"- {why}: {', '.join(kinds)}" for why, kinds in sorted(others[verdict].items())]
    return "\n".join(lines)


def short(detail):
    """What model types have in common that are not compared."""
    if detail.startswith("eager: ImportError") or "No module named" in detail:
        return "a package that is not installed"
    if detail.startswith("eager"):
        return "no small model or inputs for it that eager attention computes"
    if detail.startswith("no class"):
        return "transformers has no model of it"
    detail = re.sub(r"^UnsupportedError: (\w+Config: )?|torch\.|and the shape \([^)]*\)", "", detail)
    detail = re.sub(r"[A-Z0-9_]+_CLASSES, which has no .*", "table", detail)
    return " ".join(re.split(r"[:;] ", detail)[0].split())


def write(path, text):
    path = pathlib.Path(path)
    before, _, rest = path.read_text().partition(MARKS[0])
    path.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    listed = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--only", type=listed, help="model types")
    parser.add_argument("--forms", type=listed, default=FORMS, help=", ".join(FORMS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="f32 on cpu, bf16 on cuda")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=120, help="seconds for a model type")
    parser.add_argument("--results", help="lines of JSON; model types that are in it are not run again")
    parser.add_argument("--write", help="a file with the table between its markers")
    parser.add_argument("--debug", action="store_true", help="print errors and inputs")
    args = parser.parse_args()
    for name, known in (("--forms", FORMS), ("--only", list(CONFIG_MAPPING_NAMES))):
        given = getattr(args, name[2:]) or []
        if unknown := [x for x in given if x not in known]:
            parser.error(f"{name}: {', '.join(unknown)} not known; known are {', '.join(known)}")
    if args.write and not (os.path.exists(args.write) and all(x in open(args.write).read() for x in MARKS)):
        parser.error(f"--write {args.write}: a file with the lines {MARKS[0]} and {MARKS[1]} is needed")
    Calls.instance = Calls()
    done = {}
    if args.results and os.path.exists(args.results):
        done = {x["kind"]: x for x in map(json.loads, open(args.results))}
    kinds = [x for x in sorted(args.only or CONFIG_MAPPING_NAMES) if x not in done]
    for one in run(Sweep(args), kinds, args.jobs, args.timeout):
        done[one["kind"]] = one
        bad = {k: v for k, v in one["forms"].items() if v[0] in (WRONG, ERROR)}
        signs = " ".join(f"{form}:{SIGNS[verdict] or '-'}" for form, (verdict, _) in one["forms"].items())
        print(f"{one['kind']:32} {signs} {one['seconds']:.0f} s {bad or ''}", flush=True)
        if args.results:
            with open(args.results, "a") as file:
                file.write(json.dumps(one) + "\n")
    if args.write:
        write(args.write, table(done, args.device))
    print(summary(done))
    return 1 if any(verdict_of(x["forms"]) in (WRONG, ERROR) for x in done.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
