//! Hashes of blocks of memory, which the host and the device compute alike.
//!
//! A hash is two sums of NH, the universal hash of UMAC (RFC 4418, section 5.2): for random keys,
//! two given blocks that differ have equal hashes with probability 2^-64. Every worker draws its
//! own keys, so a program cannot know blocks with equal hashes.

use gpusession_proto::changes::BLOCK;

/// Hash of a block.
pub type Hash = [u64; 2];

/// 32-bit words of a block.
const WORDS: usize = BLOCK / 4;
/// Words that one step of the hash takes. The second sum's keys begin one step later.
const STEP_WORDS: usize = 4;
/// Number of keys.
pub const KEYS: usize = WORDS + STEP_WORDS;

/// Name of the kernel in [`ptx`]: source, target, number of blocks. Each warp hashes one block.
pub const KERNEL: &std::ffi::CStr = c"hash_blocks";
/// Name of the keys in [`ptx`].
pub const KERNEL_KEYS: &std::ffi::CStr = c"keys";

/// The keys of a worker.
pub struct Keys(Box<[u32; KEYS]>);

impl Keys {
    /// Draws keys from the system's random numbers.
    pub fn draw() -> Result<Self, ring::error::Unspecified> {
        use ring::rand::SecureRandom;
        let mut bytes = [0; 4 * KEYS];
        ring::rand::SystemRandom::new().fill(&mut bytes)?;
        Ok(Self::from_bytes(&bytes))
    }

    fn from_bytes(bytes: &[u8; 4 * KEYS]) -> Self {
        let mut keys = Box::new([0; KEYS]);
        for (key, bytes) in keys.iter_mut().zip(bytes.chunks_exact(4)) {
            *key = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Self(keys)
    }

    /// Returns the keys for the device.
    pub fn words(&self) -> &[u32; KEYS] {
        &self.0
    }

    /// Returns the hash of a block; the last block of a region may be shorter than [`BLOCK`].
    pub fn hash(&self, block: &[u8]) -> Hash {
        if block.len() < BLOCK {
            let mut whole = [0; BLOCK];
            whole[..block.len()].copy_from_slice(block);
            return self.hash(&whole);
        }
        let mut sums = [0u64; 2];
        for (step, bytes) in block[..BLOCK].chunks_exact(4 * STEP_WORDS).enumerate() {
            let word = |i: usize| {
                u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
            };
            for (sum, keys) in sums.iter_mut().zip(self.0[STEP_WORDS * step..].chunks_exact(STEP_WORDS)) {
                let pair = |i: usize| {
                    u64::from(word(i).wrapping_add(keys[i]))
                        * u64::from(word(i + 1).wrapping_add(keys[i + 1]))
                };
                *sum = sum.wrapping_add(pair(0)).wrapping_add(pair(2));
            }
        }
        sums
    }
}

/// Returns the kernel that hashes blocks of device memory.
pub fn ptx() -> String {
    use std::fmt::Write;
    let mut reduce = String::new();
    for (sum, distance) in [16, 8, 4, 2, 1].iter().flat_map(|d| [(6, d), (7, d)]) {
        let _ = write!(
            reduce,
            "mov.b64 {{%r30, %r31}}, %rd{sum};\n\
             shfl.sync.bfly.b32 %r32, %r30, {distance}, 31, -1;\n\
             shfl.sync.bfly.b32 %r33, %r31, {distance}, 31, -1;\n\
             mov.b64 %rd8, {{%r32, %r33}};\n\
             add.s64 %rd{sum}, %rd{sum}, %rd8;\n"
        );
    }
    format!(
        ".version 6.0
.target sm_50
.address_size 64
.global .align 16 .b32 keys[{KEYS}];
.visible .entry hash_blocks(.param .u64 source, .param .u64 target, .param .u32 count)
{{
.reg .pred %p<3>;
.reg .b32 %r<34>;
.reg .b64 %rd<10>;
ld.param.u64 %rd1, [source];
ld.param.u64 %rd2, [target];
ld.param.u32 %r1, [count];
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ntid.x;
mov.u32 %r4, %tid.x;
mad.lo.u32 %r5, %r2, %r3, %r4;
shr.u32 %r6, %r5, 5; // the block
and.b32 %r7, %r4, 31; // the lane
setp.ge.u32 %p1, %r6, %r1;
@%p1 bra done;
mul.wide.u32 %rd3, %r6, {BLOCK};
add.s64 %rd3, %rd1, %rd3;
mul.wide.u32 %rd4, %r7, 16;
add.s64 %rd3, %rd3, %rd4;
mov.u64 %rd5, keys;
add.s64 %rd5, %rd5, %rd4;
mov.u64 %rd6, 0;
mov.u64 %rd7, 0;
mov.u32 %r8, 0;
step:
ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd3];
ld.global.v4.u32 {{%r14, %r15, %r16, %r17}}, [%rd5];
ld.global.v4.u32 {{%r18, %r19, %r20, %r21}}, [%rd5+16];
add.u32 %r22, %r10, %r14;
add.u32 %r23, %r11, %r15;
add.u32 %r24, %r12, %r16;
add.u32 %r25, %r13, %r17;
mad.wide.u32 %rd6, %r22, %r23, %rd6;
mad.wide.u32 %rd6, %r24, %r25, %rd6;
add.u32 %r26, %r10, %r18;
add.u32 %r27, %r11, %r19;
add.u32 %r28, %r12, %r20;
add.u32 %r29, %r13, %r21;
mad.wide.u32 %rd7, %r26, %r27, %rd7;
mad.wide.u32 %rd7, %r28, %r29, %rd7;
add.s64 %rd3, %rd3, 512;
add.s64 %rd5, %rd5, 512;
add.u32 %r8, %r8, 1;
setp.lt.u32 %p2, %r8, {steps};
@%p2 bra step;
{reduce}setp.ne.u32 %p1, %r7, 0;
@%p1 bra done;
mul.wide.u32 %rd4, %r6, 16;
add.s64 %rd2, %rd2, %rd4;
st.global.v2.u64 [%rd2], {{%rd6, %rd7}};
done:
ret;
}}
",
        steps = BLOCK / 512,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_of_a_block_counts() {
        let mut block = vec![0; BLOCK];
        let keys = Keys::draw().unwrap();
        let zero = keys.hash(&block);
        assert_eq!(keys.hash(&block[..5]), zero, "a short block counts as one with zeros behind it");
        // Another bit of each word, and all bits of the first and the last one.
        let of_each = (0..BLOCK / 4).map(|word| 32 * word + 7 * word % 32);
        for bit in of_each.chain(0..32).chain(8 * BLOCK - 32..8 * BLOCK) {
            block[bit / 8] = 1 << (bit % 8);
            assert_ne!(keys.hash(&block), zero, "bit {bit}");
            block[bit / 8] = 0;
        }
    }

    #[test]
    fn hash_is_that_of_the_definition() {
        let bytes: Vec<u8> = (0..4 * KEYS).map(|i| (i * 7 + i / 256) as u8).collect();
        let keys = Keys::from_bytes(&bytes.try_into().unwrap());
        let block: Vec<u8> = (0..BLOCK).map(|i| (i * 13 + i / 256) as u8).collect();
        let words: Vec<u32> = block.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
        for (sum, shift) in keys.hash(&block).into_iter().zip([0, 4]) {
            let mut expected = 0u128;
            for i in (0..WORDS).step_by(2) {
                let key = |i: usize| u128::from(words[i].wrapping_add(keys.words()[i + shift]));
                expected += key(i) * key(i + 1);
            }
            assert_eq!(sum, expected as u64);
        }
    }

    #[test]
    fn different_workers_have_different_keys() {
        assert_ne!(Keys::draw().unwrap().words(), Keys::draw().unwrap().words());
    }
}
