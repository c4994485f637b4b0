"""Inputs of a request, and the call that a peer makes of them."""

import math

L2_BYTES_FALLBACK = 50 << 20
MAX_INPUT_SETS = 32


class Inputs:
    """Sets of q, k, v, dout in BSHD memory (packed and paged where asked), up to MAX_INPUT_SETS: so many that
    with an output each they would take twice the L2 cache. Our own calls have about as many (fa-lab's Calls)."""

    def __init__(self, torch, request, device, most=MAX_INPUT_SETS):
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[request["dtype"]]
        heads_q, heads_kv = request["heads_q"], request["heads_kv"]
        sides = self.sides(request)
        shapes = {
            "q": (*sides["q"], heads_q, request["head_dim"]),
            "k": (*sides["k"], heads_kv, request["head_dim"]),
            "v": (*sides["k"], heads_kv, request["head_dim_v"]),
            "dout": (*sides["q"], heads_q, request["head_dim_v"]),
        }
        read = ("q", "k", "v", "dout") if request["mode"] == "bwd" else ("q", "k", "v")
        bytes_per_set = 2 * sum(math.prod(shape) for shape in shapes.values())
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or L2_BYTES_FALLBACK
        count = max(1, min(most, math.ceil(2 * cache / max(bytes_per_set, 1))))
        generator = torch.Generator(device=device).manual_seed(0)
        leaf = request["mode"] == "bwd"

        def draw(name):
            tensor = torch.randn(shapes[name], device=device, dtype=torch.float32, generator=generator)
            tensor = tensor.to(dtype)
            return tensor.requires_grad_() if leaf and name != "dout" else tensor

        extras = self.arrays(torch, request, device)
        if request.get("sinks"):
            sinks = torch.randn(heads_q, device=device, dtype=torch.float32, generator=generator)
            extras["sinks"] = sinks.requires_grad_() if leaf else sinks
        self.sets = [{name: draw(name) for name in read} | extras for _ in range(count)]

    @staticmethod
    def sides(request):
        """The leading lengths of the queries' and of the keys' tensors."""
        found = {}
        for side, seqlen in (("q", request["seqlen_q"]), ("k", request["seqlen_k"])):
            sequences = (request.get("sequences") or {}).get(side)
            if sequences and sequences["store"] == "packed":
                found[side] = (max(sum(sequences["lens"]), 1),)
            elif sequences and sequences["store"] == "paged":
                page = sequences["page"]
                found[side] = (max(sum(-(-length // page) for length in sequences["lens"]), 1), page)
            else:
                found[side] = (request["batch"], seqlen)
        return found

    @staticmethod
    def arrays(torch, request, device):
        """Lengths, starts and pages of the sequences, i32 on the device."""
        found = {}
        for side, sequences in (request.get("sequences") or {}).items():
            lens = sequences["lens"]
            own = torch.tensor(lens, dtype=torch.int32, device=device)
            seqlen = request["seqlen_q"] if side == "q" else request["seqlen_k"]
            if sequences["store"] == "packed":
                cu = torch.zeros(len(lens) + 1, dtype=torch.int32, device=device)
                cu[1:] = own.cumsum(0)
                found[f"cu_{side}"] = cu
            elif sequences["store"] == "paged" or any(length != seqlen for length in lens) or side == "k":
                found[f"used_{side}"] = own
            if sequences["store"] == "paged":
                page = sequences["page"]
                needed = [-(-length // page) for length in lens]
                generator = torch.Generator().manual_seed(page)
                order = torch.randperm(sum(needed), generator=generator).to(torch.int32)
                columns = max(-(-seqlen // page), max(needed, default=1), 1)
                table = torch.zeros((len(lens), columns), dtype=torch.int32)
                first = 0
                for row, count in enumerate(needed):
                    table[row, :count] = order[first : first + count]
                    first += count
                found["table"] = table.to(device)
        return found


def make_call(torch, peer, request, inputs):
    """A call that takes the next input set each time and returns what to compare, by name: out, or dq, dk and
    dv."""
    turn = 0
    if request["mode"] == "fwd":

        def call():
            nonlocal turn
            tensors = inputs.sets[turn % len(inputs.sets)]
            turn += 1
            with torch.no_grad():
                return {"out": peer(tensors, request)}

        return call

    graphs = []
    for tensors in inputs.sets:
        leaves = {f"d{name}": tensors[name] for name in ("q", "k", "v", "sinks") if name in tensors}
        graphs.append((peer(tensors, request), leaves, tensors["dout"]))

    def call():
        nonlocal turn
        out, leaves, dout = graphs[turn % len(graphs)]
        turn += 1
        gradients = torch.autograd.grad(out, list(leaves.values()), dout, retain_graph=True)
        return dict(zip(leaves, gradients, strict=True))

    return call


def disagreement(result, reference):
    difference = (result.float() - reference.float()).square().mean().sqrt().item()
    size = reference.float().square().mean().sqrt().item()
    return difference / max(size, 1e-30)
