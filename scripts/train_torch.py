"""The transformer of `crates/fa-attn/examples/train` in torch, in f64: prints the loss before each of 100 steps.

    python3 scripts/train_torch.py > crates/fa-attn/examples/train/torch.txt
"""

import math
import pathlib

import torch
import torch.nn.functional as F

WIDTH, HEADS, HIDDEN, BLOCKS, CONTEXT, BATCH, SPREAD, STEPS = 64, 2, 128, 2, 64, 4, 0.08, 100
FOLDER = pathlib.Path(__file__).parent.parent / "crates/fa-attn/examples/train"


class Generator:
    """The generator of model.rs: parameters start the same on both sides."""

    def __init__(self):
        self.state = 1

    def param(self, *shape):
        values = []
        for _ in range(math.prod(shape)):
            self.state = (self.state * 1664525 + 1013904223) % 2**32
            values.append((self.state >> 8) / 2**23 - 1)
        spread = torch.tensor(SPREAD, dtype=torch.float32)
        start = torch.tensor(values, dtype=torch.float32) * spread
        return start.double().reshape(shape).requires_grad_()


text = (FOLDER / "text.txt").read_bytes()
alphabet = sorted(set(text))
ids = torch.tensor([alphabet.index(byte) for byte in text])
stride = (len(ids) - CONTEXT - 1) // (BATCH - 1)
tokens = torch.stack([ids[i * stride :][:CONTEXT] for i in range(BATCH)])
targets = torch.stack([ids[i * stride + 1 :][:CONTEXT] for i in range(BATCH)])

draw = Generator().param
embedding, position = draw(len(alphabet), WIDTH), draw(CONTEXT, WIDTH)
blocks = [
    [draw(WIDTH, WIDTH), draw(WIDTH, WIDTH), draw(WIDTH, WIDTH), draw(WIDTH, WIDTH), draw(WIDTH, HIDDEN), draw(HIDDEN, WIDTH)]
    for _ in range(BLOCKS)
]
head = draw(WIDTH, len(alphabet))
params = [embedding, position, head] + [param for block in blocks for param in block]
adam = torch.optim.Adam(params, lr=3e-3, betas=(0.9, 0.99), eps=1e-8)


def norm(x):
    return F.layer_norm(x, (WIDTH,))


def heads(x):
    return x.reshape(BATCH, CONTEXT, HEADS, WIDTH // HEADS).transpose(1, 2)


for _ in range(STEPS):
    x = embedding[tokens] + position
    for query, key, value, output, up, down in blocks:
        y = norm(x)
        out = F.scaled_dot_product_attention(heads(y @ query), heads(y @ key), heads(y @ value), is_causal=True)
        x = x + out.transpose(1, 2).reshape(BATCH, CONTEXT, WIDTH) @ output
        x = x + F.gelu(norm(x) @ up, approximate="tanh") @ down
    loss = F.cross_entropy((norm(x) @ head).flatten(0, 1), targets.flatten())
    print(f"{loss.item():.6f}")
    adam.zero_grad()
    loss.backward()
    adam.step()
