//! Frames that a relay changes on their way, as a program or a server makes them that means harm.

/// Bytes before a frame's body.
pub(crate) const HEADER: usize = 40;
/// Place of a frame's kind, flags and thread.
const KIND: usize = 4;
/// Most words that a connection keeps.
const MAX_SEEN: usize = 4096;
/// Words of each part of a frame that it looks at.
const LOOKED_AT: usize = 64;

/// Changes of frames.
#[derive(Debug, Clone, Copy)]
pub struct Altered {
    /// Number of the first unit that may change, from 0.
    pub from: u32,
    /// Units of which one changes on average.
    pub one_in: u32,
    pub seed: u64,
}

/// Words of a connection so far, which changed frames have in other places.
pub(crate) struct Words {
    altered: Altered,
    random: fastrand::Rng,
    seen: Vec<[u8; 8]>,
    /// Kind, flags and thread of frames.
    kinds: Vec<[u8; 8]>,
    /// Place of the change in the present unit.
    place: Option<(usize, [u8; 8])>,
}

impl Words {
    pub(crate) fn new(altered: Altered) -> Self {
        let random = fastrand::Rng::with_seed(altered.seed);
        Self { altered, random, seen: Vec::new(), kinds: Vec::new(), place: None }
    }

    /// Draws whether a unit of this length changes, and where.
    ///
    /// The length of a frame stays, so that what follows is a frame, too.
    pub(crate) fn begin(&mut self, unit: u32, len: usize) {
        self.place = None;
        if unit < self.altered.from || len < HEADER || self.random.u32(..self.altered.one_in) > 0 {
            return;
        }
        // Few change their kind, flags or thread; the others a word of the body.
        let (at, word) = match self.random.u32(..16) {
            0 => (KIND, self.random.u64(..1 << 24).to_le_bytes()),
            1 if !self.kinds.is_empty() => (KIND, self.kinds[self.random.usize(..self.kinds.len())]),
            _ if len > HEADER => (HEADER + 8 * self.random.usize(..(len - HEADER) / 8), self.word()),
            _ => return,
        };
        self.place = Some((at, word));
    }

    fn word(&mut self) -> [u8; 8] {
        let random = &mut self.random;
        match random.u32(..6) {
            0 => random.u64(..16).to_le_bytes(),
            1 => (1_u64 << random.u32(..64)).wrapping_sub(random.u64(..2)).to_le_bytes(),
            2 => (u64::MAX - random.u64(..16)).to_le_bytes(),
            3 if !self.seen.is_empty() => {
                let near = u64::from_le_bytes(self.seen[random.usize(..self.seen.len())]);
                near.wrapping_add(random.u64(..32)).wrapping_sub(16).to_le_bytes()
            }
            _ if !self.seen.is_empty() => self.seen[random.usize(..self.seen.len())],
            _ => random.u64(..).to_le_bytes(),
        }
    }

    /// Changes bytes of the unit that begin `at` in it, and notes its words.
    pub(crate) fn pass(&mut self, at: usize, bytes: &mut [u8]) -> bool {
        if at >= HEADER && at.is_multiple_of(8) {
            for word in bytes.chunks_exact(8).take(LOOKED_AT) {
                let word = word.try_into().expect("8 bytes");
                match self.seen.len() < MAX_SEEN {
                    true => self.seen.push(word),
                    false => self.seen[self.random.usize(..MAX_SEEN)] = word,
                }
            }
        }
        if let Some(kind) = bytes.get(KIND..KIND + 8).filter(|_| at == 0 && self.kinds.len() < MAX_SEEN) {
            self.kinds.push(kind.try_into().expect("8 bytes"));
        }
        let Some((place, word)) = self.place else { return false };
        let mut changed = false;
        for (offset, byte) in (place..).zip(word) {
            if let Some(old) = offset.checked_sub(at).and_then(|i| bytes.get_mut(i)) {
                changed |= *old != byte;
                *old = byte;
            }
        }
        changed
    }
}
