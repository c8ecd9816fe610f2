//! Gives each target its seeds, the files of its corpus, and changes of both.
//!
//! `PARSER_CHANGES` is the number of changes of each input (default 1,000), `PARSER_SEED` selects
//! others.

use std::path::Path;

use gpusession_parsers::{TARGETS, Target, target};

/// Words at the edges of integers, which lengths and offsets are compared with.
const EDGES: [u64; 9] = [0, 1, 7, 0x7f, 0xff, 0xffff, 0x7fff_ffff, u32::MAX as u64, u64::MAX];

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().expect(name))
}

fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let Ok(files) = std::fs::read_dir(folder) else { return Vec::new() };
    files.map(|file| std::fs::read(file.expect("an entry").path()).expect("a file")).collect()
}

/// Changes some bytes: flips, replaces, removes, repeats, cuts off, or joins with another input.
fn change(random: &mut fastrand::Rng, input: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..random.usize(1..4) {
        let (at, len) = (random.usize(0..=bytes.len()), random.usize(0..16));
        let end = (at + len).min(bytes.len());
        match random.u8(0..8) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.u8(0..8),
            1 if at < bytes.len() => bytes[at] = random.u8(..),
            2 => {
                let word = random.choice(EDGES).unwrap_or_default().to_le_bytes();
                let n = random.usize(1..=8).min(bytes.len() - at);
                bytes[at..at + n].copy_from_slice(&word[..n]);
            }
            3 => drop(bytes.drain(at..end)),
            4 => bytes.extend_from_within(at..end),
            5 => bytes.truncate(at),
            6 => bytes.splice(at..at, other.iter().copied().take(len)).for_each(drop),
            _ => bytes.splice(at..end, other.iter().copied().skip(at).take(len)).for_each(drop),
        }
    }
    bytes
}

#[test]
fn no_input_makes_a_parser_fail() {
    let (changes, seed) = (setting("PARSER_CHANGES", 1000), setting("PARSER_SEED", 1));
    for target in TARGETS {
        let mut random = fastrand::Rng::with_seed(seed);
        let seeds = (target.seeds)();
        assert!(!seeds.iter().any(Vec::is_empty) && !seeds.is_empty(), "{}: no seeds", target.name);
        let inputs = [seeds, corpus(target)].concat();
        for input in &inputs {
            (target.run)(input);
            for number in 0..changes {
                let other = &inputs[random.usize(..inputs.len())];
                let changed = change(&mut random, input, other);
                let run = std::panic::catch_unwind(|| (target.run)(&changed));
                let hex: String = changed.iter().map(|byte| format!("{byte:02x}")).collect();
                assert!(run.is_ok(), "{}: change {number}, PARSER_SEED={seed}: {hex}", target.name);
            }
        }
    }
}

#[test]
fn a_folder_of_the_corpus_is_a_targets() {
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    // There is none before a search has found anything.
    for folder in std::fs::read_dir(folders).into_iter().flatten() {
        let name = folder.expect("an entry").file_name().into_string().expect("a name");
        assert!(target(&name).is_some(), "corpus/{name}: no such target");
    }
}
