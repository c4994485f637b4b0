#!/usr/bin/env python3
"""Tests of peers.py that need neither torch nor a GPU: what is asked for, what is refused, and how peers are
called."""

import gc
import sys
import types
import unittest
import weakref
from unittest import mock

from fa_peers.inputs import Inputs
from fa_peers.kernels import LOADERS, FlashInfer, Package, Sdpa
from fa_peers.report import Refused
from fa_peers.request import checked_request, compile_key
from fa_peers.timing import Replay


def request(**changes):
    base = {"mode": "fwd", "batch": 2, "heads_q": 8, "heads_kv": 2, "seqlen_q": 10, "seqlen_k": 100,
            "head_dim": 64, "head_dim_v": 64, "causal": True, "dtype": "bf16", "reps": 1}
    return base | changes


PACKED = {"q": {"store": "packed", "lens": [10, 3]}, "k": {"store": "packed", "lens": [100, 0]}}
PAGED = {"q": {"store": "padded", "lens": [10, 10]}, "k": {"store": "paged", "lens": [100, 17], "page": 16}}
CACHE = {"q": {"store": "padded", "lens": [10, 10]}, "k": {"store": "padded", "lens": [100, 17]}}


class Tensor:
    """A name that stands for a tensor."""

    def __init__(self, name, shape=(2, 10, 8, 64)):
        self.name = name
        self.shape = shape

    def transpose(self, *_):
        return self


def package(**options):
    """A package whose functions say how they were called."""

    def function(name):
        def call(*_tensors, **given):
            return (name, {key: getattr(value, "name", value) for key, value in given.items()})

        return call

    names = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    without = options.pop("without", ())
    module = types.SimpleNamespace(**{name: function(name) for name in names if name not in without})
    made = Package(module, open_side=-1, **options)
    return lambda asked, names: called(made, asked, names)


def called(peer, asked, names):
    peer.refuse(asked)
    tensors = {name: Tensor(name) for name in ("q", "k", "v", *names)}
    function = {}
    for own in ("dense", "varlen", "kvcache"):
        original = getattr(peer, own)
        if original:
            def recorded(*given, _original=original, **options):
                function["called"] = _original(*given, **options)
                return function["called"][0]

            setattr(peer, own, recorded)
    peer(tensors, asked)
    return function["called"]


class Requests(unittest.TestCase):
    def test_what_fits_is_taken(self):
        for changes in ({}, {"sequences": PACKED}, {"sequences": PAGED, "graph": 16},
                        {"sinks": True, "window": [127, 0], "causal": False}):
            self.assertTrue(checked_request(request(**changes)))

    def test_what_does_not_is_refused_by_name(self):
        paged_without = {"q": PAGED["q"], "k": {"store": "paged", "lens": [1, 1]}}
        too_long = {"q": PACKED["q"], "k": {"store": "packed", "lens": [101, 0]}}
        for part, changes in (
            ("graph", {"graph": 0}),
            ("graph", {"graph": 4, "mode": "bwd"}),
            ("page", {"sequences": paged_without}),
            ("lens of k", {"sequences": too_long}),
            ("lens of q", {"sequences": {"q": {"store": "packed", "lens": [1]}, "k": PACKED["k"]}}),
            ("q and k", {"sequences": {"q": PACKED["q"]}}),
            ("softcap", {"softcap": 0}),
        ):
            with self.assertRaisesRegex(ValueError, part):
                checked_request(request(**changes))

    def test_requests_with_the_same_kernels_are_compiled_once(self):
        key = lambda **changes: compile_key(request(**changes))
        self.assertEqual(key(), key(batch=7, reps=30))
        other_lens = {"q": {"store": "packed", "lens": [1, 2]}, "k": {"store": "packed", "lens": [3, 4]}}
        self.assertEqual(key(sequences=PACKED), key(sequences=other_lens, graph=4))
        for changes in ({"sequences": PACKED}, {"sequences": PAGED}, {"causal": False}, {"sinks": True},
                        {"deterministic": True}, {"head_dim": 128}):
            self.assertNotEqual(key(), key(**changes))

    def test_tensors_have_the_rows_of_their_sequences(self):
        sides = lambda **changes: Inputs.sides(request(**changes))
        self.assertEqual(sides(), {"q": (2, 10), "k": (2, 100)})
        self.assertEqual(sides(sequences=PACKED), {"q": (13,), "k": (100,)})
        self.assertEqual(sides(sequences=PAGED), {"q": (2, 10), "k": (9, 16)})


class Refusals(unittest.TestCase):
    def refused(self, peer, part, **changes):
        with self.assertRaisesRegex(Refused, part):
            peer.refuse(request(**changes))

    def test_torch_says_what_it_does_not_take(self):
        sdpa = Sdpa.__new__(Sdpa)
        self.refused(sdpa, "sinks", sinks=True)
        self.refused(sdpa, "pages", sequences=PAGED)
        self.refused(sdpa, "window", window=[3, 0])
        self.refused(sdpa, "top-left")
        sdpa.refuse(request(causal=False))

    def test_packages_say_what_they_do_not_take(self):
        module = types.SimpleNamespace(flash_attn_func=None)
        self.refused(Package(module, -1), "neither packed", sequences=PACKED)
        self.refused(Package(module, -1), "no sinks", sinks=True)
        self.refused(Package(module, -1), "slopes", alibi="per_head")
        self.refused(Package(module, -1, forward_only=True), "forward only", mode="bwd")


class Calls(unittest.TestCase):
    def test_packed_sequences_go_to_the_varlen_function(self):
        name, given = package()(request(sequences=PACKED), ("cu_q", "cu_k"))
        self.assertEqual(name, "flash_attn_varlen_func")
        self.assertEqual((given["cu_seqlens_q"], given["cu_seqlens_k"]), ("cu_q", "cu_k"))
        self.assertEqual((given["max_seqlen_q"], given["max_seqlen_k"]), (10, 100))

    def test_caches_go_to_the_function_for_decoding(self):
        name, given = package()(request(sequences=PAGED), ("used_k", "table"))
        self.assertEqual(name, "flash_attn_with_kvcache")
        self.assertEqual((given["cache_seqlens"], given["page_table"]), ("used_k", "table"))
        name, given = package()(request(sequences=CACHE), ("used_k",))
        self.assertEqual((name, given["cache_seqlens"]), ("flash_attn_with_kvcache", "used_k"))
        self.assertNotIn("page_table", given)
        self.assertEqual(package()(request(graph=16), ())[0], "flash_attn_with_kvcache")
        self.assertEqual(package()(request(), ())[0], "flash_attn_with_kvcache")
        self.assertEqual(package()(request(seqlen_q=100), ())[0], "flash_attn_func")

    def test_without_one_pages_go_to_the_varlen_function(self):
        without = package(without=("flash_attn_with_kvcache",))
        name, given = without(request(sequences=PAGED, graph=16), ("used_k", "table"))
        self.assertEqual(name, "flash_attn_varlen_func")
        self.assertEqual((given["seqused_k"], given["page_table"]), ("used_k", "table"))

    def test_sinks_and_windows_are_passed(self):
        name, given = package(sinks=True)(request(sinks=True, causal=False, window=[127, None]), ("sinks",))
        self.assertEqual((name, given["learnable_sink"]), ("flash_attn_func", "sinks"))
        self.assertEqual(given["window_size"], (127, -1))

    def test_the_same_bits_are_asked_for(self):
        _, given = package()(request(deterministic=True, mode="bwd"), ())
        self.assertTrue(given["deterministic"])
        self.assertNotIn("deterministic", package()(request(mode="bwd"), ())[1])


def wheel(module, calls, **functions):
    """A module whose functions take these arguments and no others, and say how they were called."""
    fake = types.ModuleType(module)
    for name, arguments in functions.items():
        def call(*tensors, _name=name, _arguments=tuple(arguments.split()), **given):
            unknown = set(given) - set(_arguments)
            assert not unknown, f"{module}.{_name} has no {', '.join(sorted(unknown))}"
            assert len(tensors) == 3, f"{module}.{_name} was given {len(tensors)} tensors"
            calls.append((_name, {key: getattr(value, "name", value) for key, value in given.items()}))
            return tensors[0]

        setattr(fake, name, call)
    return fake


OPTIONS = "softmax_scale causal window_size softcap num_splits pack_gqa"
VARLEN = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k"


def wheels(calls):
    """The wheels that run on Hopper, by the arguments of their functions: fa3-fwd's has no backward, no sinks
    and no pages but in a cache's function, flash-attn-4's has no function for caches."""
    fa3 = wheel(
        "fa3_fwd_interface", calls, flash_attn_func=OPTIONS, flash_attn_varlen_func=f"{OPTIONS} {VARLEN}",
        flash_attn_with_kvcache=f"{OPTIONS} cache_seqlens page_table cu_seqlens_q max_seqlen_q",
    )
    own = f"{OPTIONS} learnable_sink deterministic"
    cute = wheel(
        "flash_attn.cute", calls, flash_attn_func=own,
        flash_attn_varlen_func=f"{own} {VARLEN} page_table",
    )
    package = types.ModuleType("flash_attn")
    package.cute = cute
    return {"fa3_fwd_interface": fa3, "flash_attn": package, "flash_attn.cute": cute}


PIECE = {"q": {"store": "padded", "lens": [10, 10]}, "k": {"store": "padded", "lens": [100, 100]}}
VARLEN_FUNC, CACHE_FUNC, FUNC = "flash_attn_varlen_func", "flash_attn_with_kvcache", "flash_attn_func"
# Rows of the serving marks, as `fa bench --marks NAME --peers` asks for them, and for fa3 and fa4 the
# function that computes each, or a word of why none does.
MARKS = [
    ("packed", {"sequences": PACKED}, VARLEN_FUNC, VARLEN_FUNC),
    ("packed, dense row", {"seqlen_q": 100}, FUNC, FUNC),
    ("chunks", {}, CACHE_FUNC, FUNC),
    ("chunks, window", {"causal": False, "window": [63, 0]}, CACHE_FUNC, FUNC),
    ("packed-bwd", {"sequences": PACKED, "mode": "bwd"}, "forward only", VARLEN_FUNC),
    ("decode", {"graph": 16, "causal": False, "seqlen_q": 1}, CACHE_FUNC, FUNC),
    ("paged, in one piece", {"sequences": PIECE, "graph": 16}, CACHE_FUNC, VARLEN_FUNC),
    ("paged, one token", {"sequences": PAGED, "graph": 16}, CACHE_FUNC, VARLEN_FUNC),
    ("paged, prefill", {"sequences": PAGED}, CACHE_FUNC, VARLEN_FUNC),
    ("step", {"sequences": PAGED, "graph": 32}, CACHE_FUNC, VARLEN_FUNC),
    ("sinks", {"sinks": True}, "no sinks", FUNC),
    ("sinks, window", {"sinks": True, "causal": False, "window": [127, 0]}, "no sinks", FUNC),
    ("no sinks, window", {"causal": False, "window": [127, 0], "seqlen_q": 100}, FUNC, FUNC),
    ("sinks --mode bwd", {"sinks": True, "mode": "bwd"}, "forward only", FUNC),
]


class Flashinfer(unittest.TestCase):
    def test_it_is_asked_for_keys_in_pages_and_whole_queries(self):
        peer = FlashInfer.__new__(FlashInfer)
        peer.refuse(checked_request(request(sequences=PAGED, graph=16)))
        peer.refuse(checked_request(request(sequences=PAGED, causal=False, window=[63, 0])))
        in_part = {**PAGED, "q": {"store": "padded", "lens": [10, 3]}}
        for changes, why in [
            ({}, "pages only"),
            ({"sequences": PACKED}, "pages only"),
            ({"sequences": PAGED, "mode": "bwd"}, "forward only"),
            ({"sequences": PAGED, "sinks": True}, "no sinks"),
            ({"sequences": in_part}, "used in part"),
            ({"sequences": PAGED, "causal": False, "window": [63, 5]}, "end at the diagonal"),
        ]:
            with self.subTest(why=why), self.assertRaisesRegex(Refused, why):
                peer.refuse(checked_request(request(**changes)))


class Graphs(unittest.TestCase):
    def test_inputs_live_as_long_as_the_graph_that_reads_them(self):
        class Input:
            pass

        own = Input()
        alive = weakref.ref(own)
        replay = Replay(mock.MagicMock(), lambda own=own: own and "result", 2)
        del own
        gc.collect()
        self.assertIsNotNone(alive())
        self.assertEqual(replay(), "result")
        self.assertEqual(replay.calls, 2)


class Marks(unittest.TestCase):
    def test_every_serving_mark_has_the_rows_that_the_wheels_compute(self):
        calls = []
        with mock.patch.dict(sys.modules, wheels(calls)):
            peers = {name: LOADERS[name](None) for name in ("fa3", "fa4")}
        for mark, changes, *answers in MARKS:
            asked = checked_request(request(**changes))
            names = ["q", "k", "v"] + (["sinks"] if asked.get("sinks") else [])
            for side, own in (asked.get("sequences") or {}).items():
                # As Inputs.arrays names them.
                names += [f"cu_{side}"] if own["store"] == "packed" else []
                names += [f"used_{side}"] if own["store"] != "packed" and side == "k" else []
                names += ["table"] if own["store"] == "paged" else []
            tensors = {name: Tensor(name) for name in names}
            for name, answer in zip(("fa3", "fa4"), answers, strict=True):
                with self.subTest(mark=mark, peer=name):
                    if not answer.startswith("flash_attn"):
                        with self.assertRaisesRegex(Refused, answer):
                            peers[name].refuse(asked)
                        continue
                    peers[name].refuse(asked)
                    peers[name](tensors, asked)
                    function, given = calls.pop()
                    self.assertEqual(function, answer)
                    # Nothing that the request has is left out.
                    for tensor in names[3:]:
                        self.assertIn(tensor, list(given.values()))
                    self.assertEqual(given["causal"], asked["causal"])
                    self.assertEqual("window_size" in given, bool(asked.get("window")))


if __name__ == "__main__":
    unittest.main()
