"""Requests, checked."""

MAX_GRAPH_CALLS = 256


def checked_request(request):
    """The request with every field present and of the right kind, or ValueError."""
    for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "reps"):
        value = request.get(name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    if request["heads_q"] % request["heads_kv"] != 0:
        raise ValueError(f"heads_q {request['heads_q']} is not a multiple of heads_kv {request['heads_kv']}")
    for name, allowed in (("mode", ("fwd", "bwd")), ("dtype", ("bf16", "f16")), ("causal", (True, False))):
        if request.get(name) not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, not {request.get(name)!r}")
    window = request.get("window")
    if window is not None:
        is_side = [side is None or type(side) is int and side >= 0 for side in window]
        if len(is_side) != 2 or not all(is_side) or request["causal"]:
            sides = "two sides, each null or at least 0, without causal"
            raise ValueError(f"window must be {sides}, not {window!r}")
    softcap = request.get("softcap")
    if softcap is not None and not (isinstance(softcap, (int, float)) and softcap > 0):
        raise ValueError(f"softcap must be above 0, not {softcap!r}")
    graph = request.get("graph")
    if graph is not None and not (type(graph) is int and 1 <= graph <= MAX_GRAPH_CALLS):
        raise ValueError(f"graph must be a whole number from 1 to {MAX_GRAPH_CALLS}, not {graph!r}")
    if graph is not None and request["mode"] == "bwd":
        raise ValueError("graph goes with the forward")
    for name in ("deterministic", "sinks"):
        if request.get(name) not in (None, True, False):
            raise ValueError(f"{name} must be true or false, not {request.get(name)!r}")
    checked_sequences(request)
    return request


def checked_sequences(request):
    """Both sides' stores and lengths, where there are any, fit the request's bounds, or ValueError."""
    sequences = request.get("sequences")
    if sequences is None:
        return
    if not isinstance(sequences, dict) or set(sequences) != {"q", "k"}:
        raise ValueError(f"sequences must have q and k, not {sequences!r}")
    for side, bound in (("q", request["seqlen_q"]), ("k", request["seqlen_k"])):
        store, lens, page = (sequences[side].get(name) for name in ("store", "lens", "page"))
        if store not in ("padded", "packed", "paged") or (store == "paged") != (page is not None):
            stores = "padded, packed or paged with a page"
            raise ValueError(f"{side} must be {stores}, not {store!r} with {page!r}")
        if page is not None and not (type(page) is int and page >= 1):
            raise ValueError(f"page must be a whole number of at least 1, not {page!r}")
        fits = isinstance(lens, list) and all(type(length) is int and 0 <= length <= bound for length in lens)
        if not fits or len(lens) != request["batch"]:
            raise ValueError(f"lens of {side} must be {request['batch']} whole numbers of at most {bound}")


def compile_key(request):
    """Requests of one key have the same kernels: batch and lengths of single sequences do not count."""
    sequences = request.get("sequences") or {}
    kinds = tuple((side, own["store"], own.get("page")) for side, own in sorted(sequences.items()))
    left_out = ("batch", "sequences", "reps", "peers", "cmd", "graph")
    rest = tuple(sorted((name, str(value)) for name, value in request.items() if name not in left_out))
    return kinds, rest
