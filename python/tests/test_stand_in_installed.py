"""The distribution fa-attn-shim, as pip installs it: found by the names of flash-attn, used by transformers'
flash_attention_2, 3 and 4, and refused beside flash-attn itself. On the CPU.

pip install torch transformers pytest && python -m pytest tests/test_stand_in_installed.py
"""

import importlib.util
import pathlib
import subprocess
import sys
import zipfile

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SHIM = pathlib.Path(__file__).resolve().parent.parent / "shim"
pytestmark = pytest.mark.skipif(not SHIM.is_dir(), reason="beside an installed package there is no shim")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder of packages with the wheel unpacked as pip does it."""
    spec = importlib.util.spec_from_file_location("shim_backend", SHIM / "backend.py")
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    folder, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    wheel = folder / backend.build_wheel(folder)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            to = site / name.split(".data/purelib/")[-1]
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(archive.read(name))
    return site


def run(site, code, *more):
    path = [str(site), *map(str, more), *(entry for entry in sys.path if entry)]
    code = f"import sys; sys.path[:0] = {path!r}\n" + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_it_is_found_by_the_name_of_flash_attn(installed):
    code = """
import importlib.metadata as metadata
import flash_attn, fa_attn
assert flash_attn.__version__ == "2.8.3", flash_attn.__version__
assert flash_attn.flash_attn_func is fa_attn.flash_attn_func
assert metadata.version("flash_attn") == metadata.version("flash-attn") == "2.8.3+fa"
names = metadata.packages_distributions()
assert {"flash-attn", "flash-attn-4", "fa-attn-shim"} == set(names["flash_attn"]), names["flash_attn"]
assert {"flash-attn-3", "fa-attn-shim"} == set(names["flash_attn_interface"]), names["flash_attn_interface"]
assert metadata.version("flash_attn_3") == "3.0.0+fa" and metadata.version("flash-attn-4") == "4.0.0+fa"
import flash_attn_interface, flash_attn_3.flash_attn_interface
assert flash_attn_3.flash_attn_interface.flash_attn_func is flash_attn_interface.flash_attn_func
owned = {str(file) for file in metadata.distribution("flash-attn").files}
assert "flash_attn/__init__.py" in owned and "flash_attn/layers/rotary.py" in owned, owned
assert names["flash_mla"] == ["fa-attn-shim"] * len(names["flash_mla"])
import flash_mla, fa_attn.flash_mla
assert flash_mla.flash_mla_with_kvcache is fa_attn.flash_mla.flash_mla_with_kvcache
"""
    done = run(installed, code)
    assert done.returncode == 0, done.stderr


# transformers asks for a GPU before it takes these; what it calls computes on the CPU all the same.
DECODER = """
import torch, transformers
from transformers.utils import import_utils
import_utils.is_torch_cuda_available = lambda: True
from transformers import modeling_flash_attention_utils as utils
utils.is_torch_cuda_available = lambda: True
assert getattr(import_utils, "is_flash_attn_%d_available" % VERSION)()
small = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=64, num_attention_heads=4)
small.update(num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
if VERSION == 4:
    # Those of other versions have no sinks by transformers' word.
    config = transformers.GptOssConfig(**small, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                                       sliding_window=9)
else:
    config = transformers.MistralConfig(**small, sliding_window=9)
torch.manual_seed(1)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
tokens = torch.randint(0, 64, (2, 30))
mask = torch.ones_like(tokens)
mask[1, :7] = 0
def results(attention):
    torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda *_: (9, 0)
    model.set_attn_implementation(attention)
    torch.cuda.is_available = lambda: False
    model.zero_grad()
    logits = model(tokens, attention_mask=mask).logits[mask.bool()]
    logits.square().sum().backward()
    grads = [x.grad.flatten() for x in model.parameters() if x.grad is not None]
    made = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
    return logits.detach(), torch.cat(grads), made
want, got = results("eager"), results("flash_attention_%d" % VERSION)
assert model.config._attn_implementation == "flash_attention_%d" % VERSION
for one, other in zip(want[:2], got[:2]):
    difference = (one - other).abs().max().item()
    assert difference < 1e-4 * one.abs().max().item(), difference
assert torch.equal(want[2], got[2])
"""


@pytest.mark.parametrize("version", [2, 3, 4])
def test_transformers_takes_it_for_each_flash_attention(installed, version):
    """Logits, gradients and tokens of a decoder with padding, by transformers' own functions around theirs."""
    done = run(installed, f"VERSION = {version}\n{DECODER}")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "name, module",
    [
        ("flash-attn", "flash_attn"),
        ("flash-attn-3", "flash_attn_interface"),
        ("flash-attn-4", "flash_attn.cute"),
    ],
)
def test_beside_flash_attn_it_refuses_to_be_imported(installed, tmp_path, name, module):
    real = tmp_path / f"{name.replace('-', '_')}-2.8.3.dist-info"
    real.mkdir()
    (real / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.8.3\n")
    done = run(installed, f"import {module}", tmp_path)
    assert done.returncode != 0
    assert f"ImportError: {name} 2.8.3 and fa-attn-shim, which stands in for it, are both" in done.stderr
    assert f"`pip uninstall {name}`" in done.stderr
