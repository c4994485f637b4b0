//! Test problems for attention implementations: lengths, head dims, heads and batches, among them the
//! problems on which known implementations failed. Crossed with masks and types they make a suite's cases, as
//! they do `fa validate`'s.

/// `(seqlen_q, seqlen_k)`, roughly from short to long: single rows, whole tiles and their neighbours, more
/// queries than keys and fewer.
pub const SHAPES: [(usize, usize); 26] = [
    (1, 1),
    (3, 3),
    (64, 32),
    (64, 128),
    (64, 1),
    (128, 128),
    (128, 192),
    (256, 256),
    (255, 256),
    (239, 1),
    (799, 3),
    (113, 203),
    (113, 128),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (384, 256),
    (640, 128),
    (512, 256),
    (1024, 1024),
    (1023, 1024),
    (1024, 1023),
    (2048, 2048),
    (4096, 4096),
    (4224, 4224),
];

/// `(head_dim, head_dim_v)` that kernels have tiles for.
pub const HEAD_DIMS: [(usize, usize); 8] =
    [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (128, 64), (64, 128)];

/// `(head_dim, head_dim_v)` between those, multiples of 8: a kernel pads them to its tile.
pub const PADDED_HEAD_DIMS: [(usize, usize); 12] = [
    (8, 8),
    (16, 16),
    (32, 32),
    (40, 40),
    (72, 72),
    (80, 80),
    (112, 112),
    (160, 160),
    (200, 200),
    (248, 248),
    (72, 40),
    (24, 104),
];

/// `(heads_q, heads_kv)`: as many of both, groups of 2 to 8, and one K/V head for all.
pub const HEADS: [(usize, usize); 5] = [(6, 6), (6, 3), (6, 1), (8, 1), (32, 8)];

/// Independent sequences.
pub const BATCHES: [usize; 3] = [1, 2, 9];
