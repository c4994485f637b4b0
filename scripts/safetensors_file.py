"""Write safetensors files whose bytes depend on nothing but their contents.

The library's own writer puts the metadata in an order that changes from run to run, so a file made again would differ
in git although nothing changed. The format is small enough to write here: eight bytes of header length (little endian),
a JSON header padded with spaces, then the tensors' bytes, row-major and little endian, in the order of the header.
"""

import json
import os
import struct
from pathlib import Path

import torch

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def write(path, tensors, metadata):
    """Write {name: tensor} and {name: str} to `path` through a temporary file; return the number of bytes."""
    header = {"__metadata__": dict(sorted(metadata.items()))}
    payload = []
    offset = 0
    # Widest elements first keeps every tensor aligned to its own element size without padding between tensors.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        payload.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for data in payload:
            file.write(data)
    os.replace(temporary, path)
    return 8 + len(text) + offset
