"""Finds the kernels' compiler in the packages of this environment."""

import os
import sys


def find_nvrtc():
    """Tells the library which NVRTC this environment's packages have (torch brings one), unless an
    environment variable names another. Kernels in the package's bundle need none."""
    if "FA_NVRTC" in os.environ:
        return
    for site in sys.path:
        for package in ("cu13", "cuda_nvrtc"):
            folder = os.path.join(site, "nvidia", package, "lib")
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            if any(name.startswith("libnvrtc.so") for name in names):
                os.environ["FA_NVRTC"] = folder
                return
