"""Trains a small Llama of transformers with its sequences spread over ranks, with the losses of one rank.

Run it alone (`python train_over_ranks.py --ranks 2`: processes and gloo on the CPU, NCCL where there are as
many GPUs), or each rank by torchrun (`torchrun --nproc-per-node 2 train_over_ranks.py`).

Each rank has its rows of the batch (zigzag), their positions for rotary embedding, and its own copy of the
model, whose gradients are added up over the ranks. Attention is the only layer that sees other rows.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fa_attn import distributed
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

LENGTH, VOCABULARY = 64, 128


def over_ranks(module, query, key, value, attention_mask, scaling, **_):
    """transformers' attention: (batch, heads, rows, head_dim) in, (batch, rows, heads, head_dim) out."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return distributed.attention(q, k, v, softmax_scale=scaling, causal=True), None


def model(attention, device):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(device)


def batches(steps, device):
    """Tokens to learn, and for each the one that follows: counting in steps of 1 to 4."""
    make = torch.Generator().manual_seed(1)
    for _ in range(steps):
        first = torch.randint(VOCABULARY, (4, 1), generator=make)
        step = torch.randint(1, 5, (4, 1), generator=make)
        rows = (first + step * torch.arange(LENGTH + 1)) % VOCABULARY
        yield rows[:, :-1].to(device), rows[:, 1:].to(device)


def train(steps, device, shards):
    """The losses; `shards`: whether this rank has a part of each sequence, or all of it."""
    trained = model("over_ranks" if shards else "sdpa", device)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    losses = []
    for tokens, following in batches(steps, device):
        places = torch.arange(LENGTH, device=device)
        if shards:
            tokens, following = distributed.shard(tokens), distributed.shard(following)
            places = distributed.positions(tokens.shape[1], device=device)
        logits = trained(tokens, position_ids=places[None], use_cache=False).logits
        # The mean over the whole batch: each rank has its share of the sum.
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
        loss = total / (4 * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if shards:
            for parameter in trained.parameters():
                dist.all_reduce(parameter.grad)
            dist.all_reduce(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def rank_of(rank, world, steps, method):
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= world
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=method, rank=rank, world_size=world)
    AttentionInterface.register("over_ranks", over_ranks)
    losses = train(steps, device, shards=True)
    if rank == 0:
        alone = train(steps, device, shards=False)
        for step, (one, other) in enumerate(zip(losses, alone)):
            print(f"step {step}: {one:.6f} over {world} ranks, {other:.6f} on one")
        apart = max(abs(one - other) for one, other in zip(losses, alone))
        assert apart < 2e-4, f"losses differ by {apart}"
        assert losses[-1] < losses[0], "nothing is learnt"
        print(f"the same losses, within {apart:.1e}")
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    if "RANK" in os.environ:
        rank_of(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), given.steps, "env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        method = f"file://{os.path.join(folder, 'store')}"
        mp.spawn(rank_of, (given.ranks, given.steps, method), nprocs=given.ranks)


if __name__ == "__main__":
    main()
