"""Builds the distribution: a wheel of the modules that stand in for flash-attn, and of metadata by its name,
which is how transformers and others look for it."""

import base64
import hashlib
import io
import pathlib
import tarfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
NAME, VERSION = "fa_attn_shim", "0.1.0"
# The distributions that these stand in for, by the versions whose functions these are; the local part keeps both
# apart. Of each the module by which it is imported, and what its files begin with.
STOOD_IN_FOR = (
    ("flash-attn", "2.8.3+fa", "flash_attn", ("flash_attn/", "flash_attn_2_cuda.py")),
    (
        "flash-attn-3",
        "3.0.0+fa",
        "flash_attn_interface\nflash_attn_3",
        ("flash_attn_interface.py", "flash_attn_3/"),
    ),
    ("flash-attn-4", "4.0.0+fa", "flash_attn", ("flash_attn/cute/",)),
)
MODULES = (
    "flash_attn",
    "flash_attn_2_cuda.py",
    "flash_attn_3",
    "flash_attn_interface.py",
    "flash_attn_interface_2_7.py",
    "flash_attn_interface_2_8.py",
    "flash_mla",
)
OWN = ("pyproject.toml", "backend.py", "README.md", "LICENSE-APACHE", "LICENSE-MIT")

TAGS = "Wheel-Version: 1.0\nGenerator: fa-attn-shim\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def sources():
    """The modules' files, by their names in the wheel."""
    for name in MODULES:
        path = HERE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield file.relative_to(HERE).as_posix(), file.read_bytes()


def metadata():
    readme = (HERE / "README.md").read_text("utf-8")
    return (
        f"Metadata-Version: 2.4\nName: fa-attn-shim\nVersion: {VERSION}\n"
        "Summary: Stands in for flash-attn: programs that import flash_attn run on fa-attn\n"
        "License-Expression: Apache-2.0 OR MIT\nRequires-Python: >=3.9\n"
        "Requires-Dist: fa-attn==0.1.0\nRequires-Dist: torch>=2.4\n"
        f"Description-Content-Type: text/markdown\n\n{readme}"
    )


def record_line(name, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def stand_in(files):
    """The metadata by the names of what these stand in for. Their records have their files: who installs one of
    them itself replaces these."""
    held = {}
    for name, version, modules, begins in STOOD_IN_FOR:
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        made = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            f"Summary: fa-attn-shim, which stands in for {name}\n",
            "INSTALLER": "fa-attn-shim\n",
            "top_level.txt": f"{modules}\n",
        }
        record = "".join(record_line(path, data) for path, data in files if path.startswith(begins))
        record += "".join(record_line(f"{folder}/{path}", text.encode()) for path, text in made.items())
        made["RECORD"] = record + f"{folder}/RECORD,,\n"
        held.update({f"{folder}/{path}": text.encode() for path, text in made.items()})
    return held


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    files = list(sources())
    info = f"{NAME}-{VERSION}.dist-info"
    # pip takes one folder of metadata at the wheel's root; what is in `.data/purelib` it copies to the same place.
    held = dict(files)
    held.update({f"{NAME}-{VERSION}.data/purelib/{name}": data for name, data in stand_in(files).items()})
    held[f"{info}/METADATA"] = metadata().encode()
    held[f"{info}/WHEEL"] = TAGS.encode()
    held[f"{info}/top_level.txt"] = (
        b"flash_attn\nflash_attn_2_cuda\nflash_attn_3\nflash_attn_interface\nflash_mla\n"
    )
    for licence in ("LICENSE-APACHE", "LICENSE-MIT"):
        held[f"{info}/licenses/{licence}"] = (HERE / licence).read_bytes()
    record = "".join(record_line(name, data) for name, data in held.items()) + f"{info}/RECORD,,\n"
    held[f"{info}/RECORD"] = record.encode()
    name = f"{NAME}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in held.items():
            wheel.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), data)
    return name


def build_sdist(sdist_directory, config_settings=None):
    name = f"{NAME}-{VERSION}"
    with tarfile.open(pathlib.Path(sdist_directory) / f"{name}.tar.gz", "w:gz") as archive:
        for own in (*OWN, *(path for path, _ in sources())):
            archive.add(HERE / own, f"{name}/{own}")
        data = metadata().encode()
        info = tarfile.TarInfo(f"{name}/PKG-INFO")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return f"{name}.tar.gz"
