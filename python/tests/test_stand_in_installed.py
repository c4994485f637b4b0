"""The distribution fa-attn-shim, as pip installs it: found by the name of flash-attn, used by transformers'
flash_attention_2, and refused beside flash-attn itself. On the CPU.

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
assert {"flash-attn", "fa-attn-shim"} == set(names["flash_attn"]), names["flash_attn"]
assert names["flash_attn_interface"] == ["fa-attn-shim"] * len(names["flash_attn_interface"])
owned = {str(file) for file in metadata.distribution("flash-attn").files}
assert "flash_attn/__init__.py" in owned and "flash_attn/layers/rotary.py" in owned, owned
assert names["flash_mla"] == ["fa-attn-shim"] * len(names["flash_mla"])
import flash_mla, fa_attn.flash_mla
assert flash_mla.flash_mla_with_kvcache is fa_attn.flash_mla.flash_mla_with_kvcache
"""
    done = run(installed, code)
    assert done.returncode == 0, done.stderr


# transformers asks for a GPU before it takes flash_attention_2; what it calls computes on the CPU all the same.
DECODER = """
import torch, transformers
from transformers.utils import import_utils
import_utils.is_torch_cuda_available = lambda: True
assert import_utils.is_flash_attn_2_available()
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=64,
                                  num_attention_heads=4, num_key_value_heads=2)
torch.manual_seed(1)
model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
tokens = torch.randint(0, 64, (2, 30))
mask = torch.ones_like(tokens)
mask[1, :7] = 0
def logits(attention):
    torch.cuda.is_available = lambda: True
    model.set_attn_implementation(attention)
    torch.cuda.is_available = lambda: False
    with torch.no_grad():
        return model(tokens, attention_mask=mask).logits.float()[mask.bool()]
want, got = logits("eager"), logits("flash_attention_2")
difference = (want - got).abs().max().item()
assert model.config._attn_implementation == "flash_attention_2"
assert difference < 0.05 * want.abs().max().item(), difference
"""


def test_transformers_takes_it_for_flash_attention_2(installed):
    done = run(installed, DECODER)
    assert done.returncode == 0, done.stderr[-2000:]


def test_beside_flash_attn_it_refuses_to_be_imported(installed, tmp_path):
    real = tmp_path / "flash_attn-2.8.3.dist-info"
    real.mkdir()
    (real / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    done = run(installed, "import flash_attn", tmp_path)
    assert done.returncode != 0
    assert "ImportError: flash-attn 2.8.3 and fa-attn-shim, which stands in for it, are both" in done.stderr
    assert "`pip uninstall flash-attn`" in done.stderr
