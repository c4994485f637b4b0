"""The operators' arguments, each declared once: their schemas' text, and a call's options and extra tensors
as the flat list that an operator takes."""

from __future__ import annotations

from ._options import TENSORS, CallOptions, Extras

# The schemas' types of the fields of `CallOptions`; a window has two sides.
_OPTIONS = {
    "scale": ("float? scale",),
    "causal": ("bool causal",),
    "window": ("SymInt left", "SymInt right"),
    "softcap": ("float softcap",),
    "deterministic": ("bool deterministic",),
    "query_offset": ("SymInt query_offset",),
    "latent": ("bool latent",),
    "kv_dtype": ("str? kv_dtype",),
    "out_dtype": ("str? out_dtype",),
    "by_heads": ("bool by_heads",),
}
OPTIONS = ", ".join(argument for field in CallOptions._fields for argument in _OPTIONS[field])
EXTRAS = ", ".join(f"Tensor? {name}" for name in TENSORS) + ", SymInt max_seqlen_q, SymInt max_seqlen_k"


def tensors(*names):
    """The tensors of these names; those that end in "?" may be None."""
    return ", ".join(f"Tensor? {name[:-1]}" if name.endswith("?") else f"Tensor {name}" for name in names)


def schema(*arguments, results):
    """A schema of these arguments with this number of tensors as results."""
    return f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * results)})"


def flat(options):
    """A call's options as arguments."""
    values = []
    for value in options:
        if isinstance(value, tuple):
            values.extend(value)
        else:
            values.append(value)
    return values


def options_of(arguments):
    """(options, other arguments) from arguments that begin with options."""
    rest = list(arguments)
    fields = []
    for field in CallOptions._fields:
        count = len(_OPTIONS[field])
        fields.append(rest[0] if count == 1 else tuple(rest[:count]))
        del rest[:count]
    return CallOptions(*fields), rest


def extras_of(arguments):
    """(extras, other arguments) from arguments that begin with extras."""
    count = len(Extras._fields)
    return Extras(*arguments[:count]), arguments[count:]
