"""The example's decoder with DeepSeek's attention generates the same tokens from both of its caches."""

import importlib.util
import pathlib

import pytest

torch = pytest.importorskip("torch")

_FILE = pathlib.Path(__file__).parents[1] / "examples" / "mla_decode.py"
_SPEC = importlib.util.spec_from_file_location("mla_decode", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
example = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)


@pytest.mark.parametrize("seed", [0, 1])
def test_absorbed_heads_generate_the_same_tokens(seed):
    model, prompts = example.Decoder(seed), example.prompts_of(seed)
    exact = torch.stack([example.by_definition(model, prompt, 24) for prompt in prompts], 1)
    # Not a token that repeats itself.
    assert len(exact.unique()) > 12
    for kind in (example.Heads, example.Latents):
        tokens, _ = example.generated(model, prompts, 24, kind)
        assert torch.equal(tokens, exact), kind.__name__


def test_absorbed_heads_have_the_same_logits():
    model, (prompt, *_) = example.Decoder(3), example.prompts_of(3)
    logits = {}
    with torch.no_grad():
        for absorbed in (False, True):

            def attend(layer, attention, q, row, absorbed=absorbed):
                if not absorbed:
                    return example.eager(attention, q, row)
                out, _ = example.flash_mla_with_kvcache(
                    attention.absorbed(q), row[:, :, None], torch.zeros(1, 1, dtype=torch.int32),
                    torch.tensor([len(prompt)], dtype=torch.int32), example.LATENT, None, None, example.SCALE,
                    causal=True,
                )  # fmt: skip
                return attention.values(out)

            logits[absorbed] = model(prompt[None], torch.arange(len(prompt)), attend)
    torch.testing.assert_close(logits[True], logits[False], atol=2e-5, rtol=2e-5)
