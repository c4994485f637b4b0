"""Models that are refused by name, before their own code fails on an implementation that it does not know."""

import functools
import sys
import weakref

import torch

from ._core import UnsupportedError


def check_model(config):
    """Refuses a model that computes attention in its own code, which would mistake this mask for one of
    scores, and a model that supports only its own attention, whose layers need not say what is causal."""
    reason = "" if config is None else _reason(type(config)) or (_ALONE if id(config) in _alone else "")
    if reason:
        raise UnsupportedError(f"{type(config).__name__}: {reason}; {_EAGER}")


_EAGER = "use attn_implementation='eager'"
_OWN = "this model computes attention in its own code, whatever attn_implementation says"
_ALONE = "this model supports no attention but its own (neither 'sdpa' nor 'flash_attention_2')"
_SUPPORTS = ("_supports_sdpa", "_supports_flash_attn", "_supports_attention_backend")


def _modeling_of(config):
    """The module that defines a configuration's models, where it has been imported."""
    folder, _, name = config.__module__.rpartition(".configuration_")
    return sys.modules.get(f"{folder}.modeling_{name}") if folder else None


def _own_classes(module):
    classes = () if module is None else vars(module).values()
    return [x for x in classes if isinstance(x, type) and x.__module__ == module.__name__]


@functools.lru_cache(maxsize=None)
def _refusal(config):
    """Why models of a configuration are not supported; empty where they are."""
    module = _modeling_of(config)
    if module is None:
        return ""
    own = _own_classes(module)
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return _OWN if any("Attention" in x.__name__ for x in own) else ""
    models = [x for x in own if hasattr(x, "_supports_sdpa")]
    is_alone = models and not any(getattr(x, name, False) for x in models for name in _SUPPORTS)
    return _ALONE if is_alone else ""


# A cache of functools is nothing that torch.compile looks into.
_reason = torch.compiler.assume_constant_result(lambda config: _refusal(config))


# Configurations of models whose class supports no attention but its own, by their identity.
_alone = weakref.WeakValueDictionary()


def check_when_made(model, names):
    """Looks at each model when it is made or its implementation set: `model` is transformers' own base."""
    made = model.get_correct_attn_implementation
    if hasattr(made, "names"):
        made.names.update(names)
        return

    @functools.wraps(made)
    def checked(self, requested_attention, *args, **options):
        if requested_attention in checked.names:
            if not any(getattr(self, name, False) for name in _SUPPORTS):
                # Parts of a model that nobody calls are no reason to refuse the whole.
                _alone[id(self.config)] = self.config
            _refuse_in_tables(type(self), requested_attention)
        return made(self, requested_attention, *args, **options)

    checked.names = set(names)
    model.get_correct_attn_implementation = checked


def _refuse_in_tables(model, name):
    """Adds an entry that raises to each table of layers by implementation in a model's modules that has none
    of this name: models look it up without asking whether it is there."""
    for base in model.__mro__:
        if base.__module__ == "transformers.modeling_utils":
            return
        for key, table in list(vars(sys.modules[base.__module__]).items()):
            if isinstance(table, dict) and "eager" in table and all(callable(x) for x in table.values()):
                table.setdefault(name, functools.partial(_refuse, key, name))


def _refuse(table, name, config, *args, **options):
    raise UnsupportedError(
        f"{type(config).__name__}: the model chooses its layers from its own {table}, which has no {name!r}; "
        f"{_EAGER}"
    )
