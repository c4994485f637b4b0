// The dropout kernel: the bits of the probabilities that are kept, by Philox 4x32 of 7 rounds. A function of
// the seed, the offset and the place alone, which fa-core's dropout.rs describes.
#pragma once
#include "dropout/dropout_params.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

struct PhiloxWords {
    u32 words[4];
};

__device__ __forceinline__ PhiloxWords philox(PhiloxWords counter, u32 first_key, u32 second_key) {
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const unsigned long long a = 0xd2511f53ull * counter.words[0], c = 0xcd9e8d57ull * counter.words[2];
        counter = {{u32(c >> 32) ^ counter.words[1] ^ first_key, u32(c),
                    u32(a >> 32) ^ counter.words[3] ^ second_key, u32(a)}};
        first_key += 0x9e3779b9u;
        second_key += 0xbb67ae85u;
    }
    return counter;
}

// The bits of byte j + 4 * i, i from 0 to 3, of which those at most `threshold` are set: those of 2 of the 4
// keys of a lane's pairs, 8 keys apart, begin at bit 8 * i.
__device__ __forceinline__ u32 kept_pairs(const PhiloxWords& random, int half, u32 threshold, int first_bit) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 pair = random.words[i] >> (16 * half);
        const u32 low = (pair & 0xff) <= threshold ? 1u : 0u,
                  high = (pair >> 8 & 0xff) <= threshold ? 2u : 0u;
        bits |= (low | high) << (8 * i + first_bit);
    }
    return bits;
}

// The kernel's body. A warp makes the words of 16 queries and 32 keys: a lane its 16 bits, four lanes a word.
__device__ __forceinline__ void dropout(const DropoutParams& params) {
    const int lane = lane_index(), row = lane / 4;
    u32 seed[2] = {params.seed[0], params.seed[1]}, offset[2] = {params.offset[0], params.offset[1]};
    u32 threshold = params.threshold;
    if (params.state != nullptr) {
        const u32* const state = static_cast<const u32*>(params.state);
        seed[0] = state[0], seed[1] = state[1], offset[0] = state[2], offset[1] = state[3];
        threshold = state[4];
    }
    const unsigned long long begin = (static_cast<unsigned long long>(offset[1]) << 32) | offset[0];
    const int blocks = (params.queries + 15) / 16;
    const i64 count = i64(params.heads) * blocks * params.words;
    const i64 step = i64(cta_count()) * (cta_threads() / 32);
#pragma unroll 1
    for (i64 index = i64(cta_index()) * (cta_threads() / 32) + warp_index(); index < count; index += step) {
        const int word = int(index % params.words);
        const i64 rest = index / params.words;
        const int block = int(rest % blocks), head = int(rest / blocks);
        const unsigned long long low = begin + 32ull * u32(head) + u32(lane);
        const PhiloxWords random =
            philox({{u32(low), u32(low >> 32), u32(block), u32(word)}}, seed[0], seed[1]);
        u32 upper = kept_pairs(random, 0, threshold, 2 * (lane % 4));
        u32 lower = kept_pairs(random, 1, threshold, 2 * (lane % 4));
        upper |= shuffle_xor(upper, 1);
        upper |= shuffle_xor(upper, 2);
        lower |= shuffle_xor(lower, 1);
        lower |= shuffle_xor(lower, 2);
        const int query = 16 * block + row + 8 * (lane % 2);
        if (lane % 4 < 2 && query < params.queries)
            params.bits[(i64(head) * params.queries + query) * params.words + word] =
                lane % 2 == 0 ? upper : lower;
    }
}

}  // namespace fa
