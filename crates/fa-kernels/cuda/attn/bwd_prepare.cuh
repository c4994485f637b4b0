#pragma once
#include "config.cuh"
#include "params.cuh"
#include "types.cuh"
#include "attn/epilogue.cuh"
namespace fa {
__device__ __forceinline__ float lo16(u32 w, Dtype t) { if (t==Dtype::Bf16) return __int_as_float(w<<16); float f; asm("{.reg .b16 h; mov.b32 {h,_}, %1; cvt.f32.f16 %0, h;}":"=f"(f):"r"(w)); return f; }
__device__ __forceinline__ float hi16(u32 w, Dtype t) { if (t==Dtype::Bf16) return __int_as_float(w&0xffff0000); return lo16(w>>16,t); }
template <auto C>
__device__ __forceinline__ void bwd_prepare(const BwdParams& params) {
    const int m = blockIdx.x % params.m_blocks, bh = blockIdx.x / params.m_blocks; const int batch = bh / params.heads_q, head = bh % params.heads_q;
    if (params.dq_turns && threadIdx.x == 0) params.dq_turns[blockIdx.x] = 0;
    if (params.tile_counter && blockIdx.x == 0 && threadIdx.x == 0) *params.tile_counter = 0;
    float4* acc = reinterpret_cast<float4*>(params.dq_accum + i64(blockIdx.x) * (C.tile_m * C.head_dim));
    for (int i = threadIdx.x; i < C.tile_m * C.head_dim / 4; i += 256) acc[i] = make_float4(0,0,0,0);
    if (params.dk_accum) { i64 total = i64(params.batch)*params.heads_kv*params.n_blocks*C.tile_n*C.head_dim; for (i64 i = i64(blockIdx.x)*256+threadIdx.x; i < total; i += i64(gridDim.x)*256) params.dk_accum[i]=0; total = i64(params.batch)*params.heads_kv*params.n_blocks*C.tile_n*C.head_dim_v; for (i64 i = i64(blockIdx.x)*256+threadIdx.x; i < total; i += i64(gridDim.x)*256) params.dv_accum[i]=0; }
    const int lane = threadIdx.x % 8;
    for (int r = threadIdx.x / 8; r < C.tile_m; r += 32) {
        const int q = m * C.tile_m + r; float sum = 0;
        if (q < params.seqlen_q) {
            const u16* o = static_cast<const u16*>(params.out) + batch*params.out_strides.batch + q*params.out_strides.seq + head*params.out_strides.head;
            const u16* d = static_cast<const u16*>(params.dout) + batch*params.dout_strides.batch + q*params.dout_strides.seq + head*params.dout_strides.head;
            for (int c = lane*8; c < params.head_dim_v; c += 64) { Vec16 a = *reinterpret_cast<const Vec16*>(o+c), b = *reinterpret_cast<const Vec16*>(d+c);
                for (int i=0;i<4;++i) sum += lo16(a.words[i],C.dtype)*lo16(b.words[i],C.dtype)+hi16(a.words[i],C.dtype)*hi16(b.words[i],C.dtype); }
        }
        for (int x=1;x<8;x*=2) sum += __shfl_xor_sync(0xffffffff,sum,x);
        if (lane==0) { const i64 at = i64(bh)*params.m_blocks*C.tile_m + q; params.dpsum[at]=sum;
            float l = __int_as_float(0x7f800000); if (q<params.seqlen_q) { l = params.lse[i64(bh)*params.seqlen_q+q]; l = l == minus_infinity() ? 0.f : l*kLog2e; } params.lse_log2[at]=l; }
    }
}
}
