"""What tests of the packages of `shim` begin with."""

import pathlib
import sys

import pytest

SHIM = pathlib.Path(__file__).resolve().parent.parent / "shim"
pytestmark = pytest.mark.skipif(not SHIM.is_dir(), reason="beside an installed package there is no shim")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """The shim before what may be installed, and none of its modules afterwards."""
    monkeypatch.syspath_prepend(str(SHIM))
    yield
    ours = ("flash_attn", "flash_attn_interface", "flash_mla")
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]
