//! Changes of memory that exists on both sides: a list of parts {offset, bytes}.
//!
//! `WRITE_HOST` and `HOST_CHANGED` carry it. Each side sends exactly the bytes that it changed, so
//! that neither overwrites the other's changes next to them.
//!
//! The other side may watch the memory meanwhile: it reads a flag, and then the data that the flag
//! announces. So [`Words`] sends a change that can be a flag behind all other changes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{Ordering, fence};

use crate::frame::{BadFrame, Reader};

/// Memory is compared in blocks of this many bytes.
pub const BLOCK: usize = 4096;
/// A frame with changes is sent once it has this many bytes.
pub const FRAME: usize = 1 << 20;
/// Granularity of changes, in bytes.
const UNIT: usize = 4;
/// Longest flag, in bytes; it is aligned.
const WORD: usize = 8;
/// Changes with this many bytes between them are no neighbours.
const APART: u64 = 64;
/// Most words that wait; further ones count as data, unless they count up. As many again may wait
/// that have grown by little, and as many that have grown by one.
const MOST_WORDS: usize = 1024;
/// Longest run of which each word can be a flag; of a longer one, the first and the last can.
const MOST_FLAGS: usize = 1024;
/// Most by which a flag grows between two uploads: NCCL's flags name the latest of eight buffers.
const MOST_GROWTH: u32 = 8;
/// Most collections of changes for one upload.
const MOST_COLLECTIONS: usize = 4;

/// Appends one part to the body of a frame.
pub fn push(body: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    body.extend_from_slice(&offset.to_le_bytes());
    body.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    body.extend_from_slice(bytes);
    body.resize(body.len().next_multiple_of(8), 0);
}

/// Returns the runs of units in which `new` differs from `old`, which has the same length.
fn differing<'a>(old: &'a [u8], new: &'a [u8]) -> impl Iterator<Item = Range<usize>> + 'a {
    let same = |unit: usize| {
        let end = (unit + UNIT).min(new.len());
        old.get(unit..end) == Some(&new[unit..end])
    };
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < new.len() && same(at) {
            at += UNIT;
        }
        let start = at;
        while at < new.len() && !same(at) {
            at += UNIT;
        }
        (start < new.len()).then(|| start..at.min(new.len()))
    })
}

/// A block of shared memory: what the other side knows, and the present contents.
pub struct Block<'a> {
    /// Number of its region.
    pub region: u64,
    /// Address here, of which only the alignment counts.
    pub address: usize,
    /// Place in the region.
    pub offset: u64,
    /// Contents that the other side knows.
    pub old: &'a [u8],
    /// Present contents.
    pub new: &'a [u8],
}

/// Changes that can be flags: they lie in one aligned word, or count up.
///
/// They travel after all other changes of all regions: words that do not count up first, those that
/// have grown by one last, and of each kind those with neighbours first.
#[derive(Default)]
pub struct Words {
    /// By region and aligned address.
    found: BTreeMap<(u64, usize), Word>,
    /// Whether the present collection has found some.
    grew: bool,
    /// Region and end of the latest change.
    end: Option<(u64, u64)>,
    /// Key of the latest change, if it is a word.
    latest: Option<(u64, usize)>,
    /// Whether the present collection is the last one, although each one before found words.
    last: bool,
    /// Region, place and earlier bytes of words that have counted up in the last collection.
    late: Vec<(u64, usize, Vec<u8>)>,
}

/// Bytes of one aligned word.
struct Word {
    /// Place in the region.
    bytes: Range<u64>,
    /// Whether it has no neighbours.
    alone: bool,
    growth: Growth,
}

/// How a word has changed: the later, the more likely it is a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Growth {
    Other,
    /// By at most [`MOST_GROWTH`].
    Little,
    One,
}

impl Words {
    /// Collects changes until a collection finds no further word; `collect` learns whether it is a
    /// repetition.
    ///
    /// A program may write data and then a flag while `collect` is between both. The collection
    /// then finds the flag only, and the next one the data. Behind the last collection comes none,
    /// so words that count up there are left to the next upload ([`Self::forget_late`]).
    pub fn collected<E>(mut collect: impl FnMut(&mut Self, bool) -> Result<(), E>) -> Result<Self, E> {
        let mut words = Self::default();
        for collection in 0..MOST_COLLECTIONS {
            (words.grew, words.end, words.latest) = (false, None, None);
            words.last = collection + 1 == MOST_COLLECTIONS;
            collect(&mut words, collection > 0)?;
            if !words.grew {
                break;
            }
            // All reads of the next collection follow those of this one.
            fence(Ordering::SeqCst);
        }
        Ok(words)
    }

    /// Appends the parts in which a block differs to the body of a frame, and keeps its words.
    pub fn push_differing(&mut self, body: &mut Vec<u8>, block: &Block<'_>) {
        differing(block.old, block.new).for_each(|run| self.push_run(body, block, run));
    }

    fn push_run(&mut self, body: &mut Vec<u8>, block: &Block<'_>, run: Range<usize>) {
        let start = block.offset + run.start as u64;
        let gap = self.end.filter(|(region, _)| *region == block.region).map(|(_, end)| start.abs_diff(end));
        let (alone, continued) = (gap.is_none_or(|gap| gap >= APART), gap == Some(0));
        self.end = Some((block.region, block.offset + run.end as u64));
        if let Some(word) = self.latest.take().and_then(|key| self.found.get_mut(&key)) {
            word.alone &= alone;
        }
        // Trying each word of much data takes longer than copying it.
        let last =
            if run.len() > MOST_FLAGS { run.end - 1 - (block.address + run.end - 1) % WORD } else { 0 };
        let mut data = run.start;
        let mut at = run.start;
        while at < run.end {
            let end = run.end.min(at + WORD - (block.address + at) % WORD);
            let growth = growth(&block.old[at..end], &block.new[at..end]);
            let whole = (at..end) == run && !continued;
            if (whole || growth > Growth::Other) && self.keep(block, at..end, alone && whole, growth) {
                push_some(body, block, data..at);
                data = end;
            }
            at = end.max(last);
        }
        push_some(body, block, data..run.end);
    }

    /// Keeps a word; `false` if there are too many.
    fn keep(&mut self, block: &Block<'_>, at: Range<usize>, alone: bool, growth: Growth) -> bool {
        let key = (block.region, (block.address + at.start) / WORD * WORD);
        if self.last && growth > Growth::Other {
            self.late.push((block.region, block.offset as usize + at.start, block.old[at].to_vec()));
            self.latest = self.found.contains_key(&key).then_some(key);
            return true;
        }
        let full = self.found.len() >= (1 + growth as usize) * MOST_WORDS;
        let bytes = block.offset + at.start as u64..block.offset + at.end as u64;
        if let Some(word) = self.found.get_mut(&key) {
            word.bytes = word.bytes.start.min(bytes.start)..word.bytes.end.max(bytes.end);
            word.alone &= alone;
            word.growth = word.growth.max(growth);
        } else if full {
            return false;
        } else {
            self.found.insert(key, Word { bytes, alone, growth });
        }
        self.latest = Some(key);
        self.grew = true;
        true
    }

    /// Gives a region's known bytes back what they were before the last collection, for its words.
    ///
    /// So the next upload finds these changes. It precedes the words' way to the other side.
    pub fn forget_late(&self, region: u64, known: &mut [u8]) {
        for (_, place, earlier) in self.late.iter().filter(|(id, ..)| *id == region) {
            if let Some(known) = known.get_mut(*place..place + earlier.len()) {
                known.copy_from_slice(earlier);
            }
        }
    }

    /// Returns the places of the words by region, in the order in which the other side must see
    /// them.
    pub fn in_order(self) -> Vec<(u64, Vec<Range<usize>>)> {
        let mut words: Vec<_> = self.found.into_iter().collect();
        words.sort_by_key(|(_, word)| (word.growth, word.alone));
        let place = |(_, word): &(_, Word)| word.bytes.start as usize..word.bytes.end as usize;
        let runs = words.chunk_by(|((a, _), _), ((b, _), _)| a == b);
        runs.map(|run| (run[0].0.0, run.iter().map(place).collect())).collect()
    }
}

/// Appends the parts of a region at these places to the body of a frame.
///
/// `bytes` are those of the region, or none if it has ended.
pub fn push_places(body: &mut Vec<u8>, bytes: &[u8], places: &[Range<usize>]) {
    for place in places {
        if let Some(bytes) = bytes.get(place.clone()) {
            push(body, place.start as u64, bytes);
        }
    }
}

fn push_some(body: &mut Vec<u8>, block: &Block<'_>, at: Range<usize>) {
    if !at.is_empty() {
        push(body, block.offset + at.start as u64, &block.new[at]);
    }
}

/// Returns how the unit has grown that counts up most like a flag.
fn growth(old: &[u8], new: &[u8]) -> Growth {
    let units = old.as_chunks().0.iter().zip(new.as_chunks().0);
    let of = |(old, new): (&[u8; 4], &[u8; 4])| match u32::from_le_bytes(*new)
        .wrapping_sub(u32::from_le_bytes(*old))
    {
        1 => Growth::One,
        2..=MOST_GROWTH => Growth::Little,
        _ => Growth::Other,
    };
    units.into_iter().map(of).max().unwrap_or(Growth::Other)
}

/// Reads the parts from the rest of a body, and passes each to `part`.
pub fn read<'a>(r: &mut Reader<'a>, mut part: impl FnMut(u64, &'a [u8])) -> Result<(), BadFrame> {
    while !r.is_empty() {
        let offset = r.word()?;
        part(offset, r.bytes()?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// Address of memory in tests, of which only the alignment counts.
    const BASE: usize = 0x1000;

    /// Offset and bytes.
    type Part = (u64, Vec<u8>);

    fn parts(body: &[u8]) -> Vec<Part> {
        let mut parts = Vec::new();
        read(&mut Reader::new(body), |offset, bytes| parts.push((offset, bytes.to_vec()))).unwrap();
        parts
    }

    /// Returns what travels first, and the places of the words in their order.
    fn split(offset: u64, old: &[u8], new: &[u8]) -> (Vec<Part>, Vec<Range<usize>>) {
        let (mut words, mut body) = (Words::default(), Vec::new());
        let address = BASE + offset as usize;
        words.push_differing(&mut body, &Block { region: 1, address, offset, old, new });
        (parts(&body), words.in_order().into_iter().flat_map(|(_, places)| places).collect())
    }

    #[test]
    fn changes_hold_exactly_the_units_that_differ() {
        let old = [7u8; 46];
        let mut new = old;
        (new[0], new[9], new[12], new[29], new[32], new[36], new[45]) = (1, 2, 3, 4, 5, 6, 9);
        let (data, words) = split(128, &old, &new);
        assert_eq!(data, [(156, new[28..40].to_vec())], "neighbours together");
        assert_eq!(words, [128..132, 136..144, 172..174], "the last one is short");
        assert_eq!(split(0, &old, &old), (Vec::new(), Vec::new()));
        assert!(read(&mut Reader::new(&[1; 8]), |_, _| ()).is_err(), "an offset without bytes");
    }

    #[test]
    fn words_that_can_be_flags_travel_last() {
        let old = [0u8; 1024];
        let mut new = old;
        // A flag in front of its data, a flag by itself, sparse data, and a value by itself.
        (new[0], new[128], new[512]) = (1, 1, 9);
        new[4..60].fill(9);
        (new[200], new[216], new[232]) = (9, 9, 9);
        let (data, words) = split(0, &old, &new);
        assert_eq!(data, [(8, new[8..60].to_vec())]);
        assert_eq!(words, [200..204, 216..220, 232..236, 512..516, 0..8, 128..132]);
        // A flag that grows by 8 below a value by itself.
        let mut new = old;
        (new[0], new[128]) = (8, 9);
        assert_eq!(split(0, &old, &new).1, [128..132, 0..4]);
        // Flags in a row.
        let mut new = old;
        new.as_chunks_mut::<4>().0[3..9].fill(1u32.to_le_bytes());
        assert_eq!(split(0, &old, &new).1, [12..16, 16..24, 24..32, 32..36]);
        let mut new = old;
        new.fill(9);
        assert_eq!(split(0, &old, &new).1, [], "data alone");
        // Much data whose words have all grown.
        let old = [0xff; 2048];
        let new: Vec<u8> = [0u32; 512].map(u32::to_le_bytes).concat();
        let (data, words) = split(4, &old[4..], &new[4..]);
        assert_eq!(words, [4..8, 2040..2048]);
        assert_eq!(data, [(8, vec![0; 2032])]);
    }

    #[test]
    fn data_that_ends_in_the_next_block_is_no_word() {
        let (mut words, mut body) = (Words::default(), Vec::new());
        for (offset, len) in [(0, BLOCK), (BLOCK, 4)] {
            let (old, mut new) = ([0; BLOCK], [0; BLOCK]);
            new[..len].fill(9);
            let block = Block { region: 1, address: BASE, offset: offset as u64, old: &old, new: &new };
            words.push_differing(&mut body, &block);
        }
        assert_eq!(parts(&body).len(), 2);
        assert!(words.in_order().is_empty());
    }

    #[test]
    fn words_are_bounded_and_none_is_lost() {
        let (old, mut new) = ([0u8; 32 * BLOCK], [0u8; 32 * BLOCK]);
        new.iter_mut().step_by(64).for_each(|byte| *byte = 9);
        let (data, words) = split(0, &old, &new);
        assert_eq!((words.len(), data.len()), (MOST_WORDS, new.len() / 64 - MOST_WORDS));
    }

    /// One of the program's writes: place and value of words.
    type Write = (Range<usize>, u64);
    /// Times a small value: a word without equal bytes to the word before.
    const DENSE: u64 = 0x0101_0101_0101_0101;

    /// Memory of two blocks that a program writes, and what the other side has got of it.
    struct Model<'a> {
        here: Vec<u8>,
        known: Vec<u8>,
        there: Vec<u8>,
        writes: std::slice::Iter<'a, Write>,
        /// Word with the flag, and the words that have its value before it does.
        flag: usize,
        data: &'a [usize],
    }

    impl Model<'_> {
        fn write(&mut self, count: usize) {
            for (words, value) in self.writes.by_ref().take(count) {
                let words = words.start * 8..words.end * 8;
                self.here[words].as_chunks_mut().0.fill(value.to_le_bytes());
            }
        }

        /// The other side gets some bytes: its flag must not be ahead of the data.
        fn get(&mut self, offset: usize, bytes: &[u8]) {
            self.there[offset..offset + bytes.len()].copy_from_slice(bytes);
            let flag = self.there[self.flag * 8];
            for word in self.data {
                let value = self.there[word * 8];
                assert!(value >= flag, "flag {flag}, but word {word} has {value}");
            }
        }

        /// Uploads as both sides do; before each block is read, the program writes this often.
        fn upload(&mut self, mut program: impl FnMut() -> usize) {
            let words = Words::collected(|words, _| {
                for block in 0..2 {
                    self.write(program());
                    let (at, mut body) = (block * BLOCK, Vec::new());
                    let old = &mut self.known[at..at + BLOCK];
                    let new = &self.here[at..at + BLOCK];
                    let offset = at as u64;
                    words.push_differing(
                        &mut body,
                        &Block { region: 1, address: BASE + at, offset, old, new },
                    );
                    old.copy_from_slice(new);
                    parts(&body).iter().for_each(|(offset, bytes)| self.get(*offset as usize, bytes));
                }
                Ok::<_, Infallible>(())
            });
            let Ok(words) = words;
            words.forget_late(1, &mut self.known);
            let mut body = Vec::new();
            words.in_order().iter().for_each(|(_, places)| push_places(&mut body, &self.known, places));
            parts(&body).iter().for_each(|(offset, bytes)| self.get(*offset as usize, bytes));
        }
    }

    #[test]
    fn flag_never_precedes_its_data_however_often_the_program_writes() {
        const SECOND: usize = BLOCK / 8;
        for (data, flag) in [(60, SECOND + 60), (SECOND + 60, 60)] {
            let writes: Vec<Write> =
                (1..10).flat_map(|n| [(data..data + 1, n + 256 * n * n), (flag..flag + 1, n)]).collect();
            // In each collection: nothing, both writes before the first read or the second, or one
            // before each.
            const CHOICES: [[usize; 2]; 4] = [[0, 0], [2, 0], [0, 2], [1, 1]];
            for pattern in 0..1u32 << (2 * MOST_COLLECTIONS) {
                let count = |read: usize| {
                    let choice = pattern.checked_shr(read as u32 / 2 * 2).unwrap_or(0) & 3;
                    CHOICES[choice as usize][read % 2]
                };
                // A flag that grows by more between two reads is none that `Words` knows.
                let seen = |c: usize| (0..=2 * c + usize::from(flag > data)).map(count).sum::<usize>() / 2;
                if (0..MOST_COLLECTIONS).any(|c| seen(c) > c.checked_sub(1).map_or(0, seen) + 1) {
                    continue;
                }
                let (here, known, there) = (vec![0; 2 * BLOCK], vec![0; 2 * BLOCK], vec![0; 2 * BLOCK]);
                let mut model = Model { here, known, there, writes: writes.iter(), flag, data: &[data] };
                let mut read = 0;
                model.upload(|| {
                    read += 1;
                    count(read - 1)
                });
                model.write(writes.len());
                model.data = &[];
                model.upload(|| 0);
                assert_eq!(model.here, model.there, "{pattern:b}");
            }
        }
    }

    #[test]
    fn flag_stays_behind_more_words_than_wait() {
        let (old, mut new) = ([0u8; 32 * BLOCK], [0u8; 32 * BLOCK]);
        new.iter_mut().step_by(64).for_each(|byte| *byte = 9);
        let last = new.len() - 64;
        new[last] = 1;
        let (_, words) = split(0, &old, &new);
        assert_eq!(words.last(), Some(&(last..last + 4)));
    }

    /// Tries every way in which the program's writes can fall between the reads of one upload.
    fn try_all(writes: &[Write], flag: usize, data: &[usize]) {
        const READS: usize = 2 * MOST_COLLECTIONS;
        // Number of the read that each write precedes; the last ones follow the upload.
        let mut before = vec![0; writes.len()];
        loop {
            let (here, known, there) = (vec![0; 2 * BLOCK], vec![0; 2 * BLOCK], vec![0; 2 * BLOCK]);
            let mut model = Model { here, known, there, writes: writes.iter(), flag, data };
            let mut read = 0;
            model.upload(|| {
                read += 1;
                before.iter().filter(|at| **at == read - 1).count()
            });
            model.write(writes.len());
            model.upload(|| 0);
            assert_eq!(model.here, model.there, "{before:?}");
            let Some(next) = before.iter().rposition(|at| *at < READS) else { return };
            let value = before[next] + 1;
            before[next..].fill(value);
        }
    }

    #[test]
    fn flag_never_precedes_its_data_however_the_program_writes_meanwhile() {
        const SECOND: usize = BLOCK / 8;
        for flag in [0, 40, SECOND - 1, SECOND, 2 * SECOND - 1] {
            let one = || flag..flag + 1;
            // Dense or sparse data beside the flag or elsewhere, also in both blocks.
            for first in [flag + 1, 8, SECOND - 4] {
                let run = first..(first + 9).min(2 * SECOND);
                if run.is_empty() || run.contains(&flag) {
                    continue;
                }
                let data: Vec<usize> = run.clone().collect();
                let near = run.start < flag + 16 && flag < run.end + 16;
                for kind in if near { &[DENSE][..] } else { &[1, DENSE] } {
                    let twice = [(run.clone(), 5 * kind), (one(), 1), (run.clone(), 9 * kind), (one(), 2)];
                    // Beside its data, a flag is known by its next value only.
                    let beside = run.start == flag + 1 || run.end == flag;
                    try_all(if beside { &twice[..2] } else { &twice }, flag, &data);
                }
            }
            // Two words of data by themselves.
            let data = [60, SECOND + 60, 100, SECOND + 100];
            let data: Vec<usize> = data.into_iter().filter(|word| word.abs_diff(flag) > 16).take(2).collect();
            let [a, b] = [0, 1].map(|i| (data[i]..data[i] + 1, 5));
            try_all(&[a, b, (one(), 1)], flag, &data);
            // The flag grows by more than one.
            let [a, b] = [0, 1].map(|i| (data[i]..data[i] + 1, 255));
            try_all(&[a, b, (one(), u64::from(MOST_GROWTH))], flag, &data);
        }
    }
}
