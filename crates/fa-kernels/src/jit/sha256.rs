//! SHA-256 (FIPS 180-4), which names kernels' sources and cubins. The crate for it brings seven more, whose
//! build is a tenth of that of this library beside candle.
#![allow(unsafe_code)]

/// Bytes of a block.
const BLOCK: usize = 64;

/// The fractions of the square roots of the first 8 primes.
const START: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// The fractions of the cube roots of the first 64 primes.
static ROUNDS: [u32; 64] = [
    0x428a_2f98,
    0x7137_4491,
    0xb5c0_fbcf,
    0xe9b5_dba5,
    0x3956_c25b,
    0x59f1_11f1,
    0x923f_82a4,
    0xab1c_5ed5,
    0xd807_aa98,
    0x1283_5b01,
    0x2431_85be,
    0x550c_7dc3,
    0x72be_5d74,
    0x80de_b1fe,
    0x9bdc_06a7,
    0xc19b_f174,
    0xe49b_69c1,
    0xefbe_4786,
    0x0fc1_9dc6,
    0x240c_a1cc,
    0x2de9_2c6f,
    0x4a74_84aa,
    0x5cb0_a9dc,
    0x76f9_88da,
    0x983e_5152,
    0xa831_c66d,
    0xb003_27c8,
    0xbf59_7fc7,
    0xc6e0_0bf3,
    0xd5a7_9147,
    0x06ca_6351,
    0x1429_2967,
    0x27b7_0a85,
    0x2e1b_2138,
    0x4d2c_6dfc,
    0x5338_0d13,
    0x650a_7354,
    0x766a_0abb,
    0x81c2_c92e,
    0x9272_2c85,
    0xa2bf_e8a1,
    0xa81a_664b,
    0xc24b_8b70,
    0xc76c_51a3,
    0xd192_e819,
    0xd699_0624,
    0xf40e_3585,
    0x106a_a070,
    0x19a4_c116,
    0x1e37_6c08,
    0x2748_774c,
    0x34b0_bcb5,
    0x391c_0cb3,
    0x4ed8_aa4a,
    0x5b9c_ca4f,
    0x682e_6ff3,
    0x748f_82ee,
    0x78a5_636f,
    0x84c8_7814,
    0x8cc7_0208,
    0x90be_fffa,
    0xa450_6ceb,
    0xbef9_a3f7,
    0xc671_78f2,
];

/// A hash of bytes that come in pieces.
pub(super) struct Sha256 {
    state: [u32; 8],
    /// The first `filled` bytes wait for the rest of their block.
    block: [u8; BLOCK],
    filled: usize,
    bytes: u64,
    compress: fn(&mut [u32; 8], &[u8]),
}

impl Sha256 {
    pub(super) fn new() -> Sha256 {
        #[cfg(target_arch = "x86_64")]
        if x86::runs() {
            return Sha256::by(x86::compress);
        }
        Sha256::by(compress)
    }

    fn by(compress: fn(&mut [u32; 8], &[u8])) -> Sha256 {
        Sha256 { state: START, block: [0; BLOCK], filled: 0, bytes: 0, compress }
    }

    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        if self.filled > 0 {
            let (first, rest) = bytes.split_at(bytes.len().min(BLOCK - self.filled));
            self.block[self.filled..self.filled + first.len()].copy_from_slice(first);
            self.filled += first.len();
            if self.filled < BLOCK {
                return;
            }
            (self.compress)(&mut self.state, &self.block);
            bytes = rest;
        }
        let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % BLOCK);
        (self.compress)(&mut self.state, whole);
        self.block[..rest.len()].copy_from_slice(rest);
        self.filled = rest.len();
    }

    /// A one bit, zeros to the end of a block, and in its last 8 bytes the length in bits.
    pub(super) fn finish(mut self) -> [u8; 32] {
        let bits = self.bytes * 8;
        let zeros = (2 * BLOCK - 9 - self.filled) % BLOCK;
        self.update(&[0x80]);
        self.update(&[0; BLOCK][..zeros]);
        self.update(&bits.to_be_bytes());
        let mut digest = [0; 32];
        for (bytes, word) in digest.chunks_exact_mut(4).zip(self.state) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        digest
    }
}

/// The 16 words of a block.
fn words(block: &[u8]) -> [u32; 16] {
    let mut words = [0; 16];
    for (word, bytes) in words.iter_mut().zip(block.chunks_exact(4)) {
        *word = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

/// Takes whole blocks into the state.
fn compress(state: &mut [u32; 8], blocks: &[u8]) {
    for block in blocks.chunks_exact(BLOCK) {
        let mut words = words(block);
        let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
        for round in 0..64 {
            let word = |ago: usize| words[(round + 16 - ago) % 16];
            if round >= 16 {
                let (near, far) = (word(2), word(15));
                let near = near.rotate_right(17) ^ near.rotate_right(19) ^ (near >> 10);
                let far = far.rotate_right(7) ^ far.rotate_right(18) ^ (far >> 3);
                words[round % 16] = word(16).wrapping_add(far).wrapping_add(word(7)).wrapping_add(near);
            }
            let choice = (e & f) ^ (!e & g);
            let majority = (a & b) ^ (a & c) ^ (b & c);
            let first = (e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25))
                .wrapping_add(h)
                .wrapping_add(choice)
                .wrapping_add(ROUNDS[round])
                .wrapping_add(words[round % 16]);
            let second = (a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22)).wrapping_add(majority);
            (h, g, f, e) = (g, f, e, d.wrapping_add(first));
            (d, c, b, a) = (c, b, a, first.wrapping_add(second));
        }
        for (sum, word) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
            *sum = sum.wrapping_add(word);
        }
    }
}

/// By the instructions that x86 has for it: five times as fast.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, _mm_add_epi32, _mm_alignr_epi8, _mm_extract_epi32, _mm_set_epi32, _mm_sha256msg1_epu32,
        _mm_sha256msg2_epu32, _mm_sha256rnds2_epu32, _mm_shuffle_epi32,
    };

    use super::{BLOCK, ROUNDS, words};

    pub(super) fn runs() -> bool {
        let both = is_x86_feature_detected!("sha") && is_x86_feature_detected!("ssse3");
        both && is_x86_feature_detected!("sse4.1")
    }

    pub(super) fn compress(state: &mut [u32; 8], blocks: &[u8]) {
        // SAFETY: `runs` has said that the CPU has these instructions.
        unsafe { with_instructions(state, blocks) }
    }

    /// Four words, the first in the lowest lane.
    #[target_feature(enable = "sse2")]
    fn four(words: &[u32]) -> __m128i {
        _mm_set_epi32(words[3] as i32, words[2] as i32, words[1] as i32, words[0] as i32)
    }

    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn with_instructions(state: &mut [u32; 8], blocks: &[u8]) {
        let [a, b, c, d, e, f, g, h] = state.map(|word| word as i32);
        // The order in which the instructions have the state.
        let (mut abef, mut cdgh) = (_mm_set_epi32(a, b, e, f), _mm_set_epi32(c, d, g, h));
        for block in blocks.chunks_exact(BLOCK) {
            let before = (abef, cdgh);
            let words = words(block);
            let mut last = [four(&words), four(&words[4..]), four(&words[8..]), four(&words[12..])];
            for step in 0..16 {
                if step >= 4 {
                    let sum = _mm_sha256msg1_epu32(last[0], last[1]);
                    let sum = _mm_add_epi32(sum, _mm_alignr_epi8::<4>(last[3], last[2]));
                    last = [last[1], last[2], last[3], _mm_sha256msg2_epu32(sum, last[3])];
                }
                let words = _mm_add_epi32(last[step.min(3)], four(&ROUNDS[4 * step..]));
                // Two rounds each: what was ABEF is CDGH afterwards.
                cdgh = _mm_sha256rnds2_epu32(cdgh, abef, words);
                abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32::<0b1110>(words));
            }
            (abef, cdgh) = (_mm_add_epi32(abef, before.0), _mm_add_epi32(cdgh, before.1));
        }
        let (a, b) = (_mm_extract_epi32::<3>(abef), _mm_extract_epi32::<2>(abef));
        let (e, f) = (_mm_extract_epi32::<1>(abef), _mm_extract_epi32::<0>(abef));
        let (c, d) = (_mm_extract_epi32::<3>(cdgh), _mm_extract_epi32::<2>(cdgh));
        let (g, h) = (_mm_extract_epi32::<1>(cdgh), _mm_extract_epi32::<0>(cdgh));
        *state = [a, b, c, d, e, f, g, h].map(|word| word as u32);
    }
}

#[cfg(test)]
mod tests {
    use sha2::Digest;

    use super::*;

    #[test]
    fn hashes_are_those_of_the_standard() {
        let hex = |digest: [u8; 32]| digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let long = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
        for (text, need) in [
            ("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            ("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (long, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"),
        ] {
            for mut hasher in [Sha256::new(), Sha256::by(compress)] {
                hasher.update(text.as_bytes());
                assert_eq!(hex(hasher.finish()), need);
            }
        }
    }

    #[test]
    fn lengths_and_pieces_change_nothing() {
        let bytes: Vec<u8> = (0..1000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for len in (0..200).chain([447, 448, 511, 512, 513, 1000]) {
            let need: [u8; 32] = sha2::Sha256::digest(&bytes[..len]).into();
            for piece in [1, 7, 55, 63, 64, 65, 128, 1000] {
                for mut hasher in [Sha256::new(), Sha256::by(compress)] {
                    bytes[..len].chunks(piece).for_each(|piece| hasher.update(piece));
                    assert_eq!(hasher.finish(), need, "{len} bytes in pieces of {piece}");
                }
            }
        }
    }
}
