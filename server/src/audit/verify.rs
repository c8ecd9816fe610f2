//! Verifies the trail's files: chain, checkpoints, and what was cut.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};

use super::{Bad, CHECKPOINT, Line, NO_LINE, PRUNED, Verified, checkpoint_in, files, folder, hash, place};
use crate::checkpoint::{Place, Verifier};

/// Domain of signatures by a server of an earlier release, with a key of its own.
pub(super) const SIGNED_BY_SERVER: &str = "gpusession audit checkpoint 1";

/// Verifies the chain and the signatures of a state directory's trail.
pub fn verify(state_dir: &Path, verifier: &Verifier) -> Result<Verified, Bad> {
    let folder = folder(state_dir);
    let broken = |file: &Path, line: usize, why: String| Bad { file: file.into(), line, why };
    let read = |e: io::Error, file: &Path| broken(file, 0, e.to_string());
    let mut signatures = Signatures::new(&folder, verifier).map_err(|e| read(e, &folder))?;
    let mut done = Verified { last_hash: NO_LINE.into(), ..Verified::default() };
    // The first line that is left names the last one of a deleted day.
    let mut begins: Option<(PathBuf, String)> = None;
    let mut pruned = BTreeMap::new();
    let mut last = folder.clone();
    for file in files(&folder).map_err(|e| read(e, &folder))? {
        let bytes = fs::read(&file).map_err(|e| read(e, &file))?;
        let whole = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        for (n, text) in whole.split(|b| *b == b'\n').enumerate().filter(|_| !whole.is_empty()) {
            let bad = |why: &str| broken(&file, n + 1, why.into());
            let line: Line = serde_json::from_slice(text).map_err(|e| bad(&format!("not a line: {e}")))?;
            if done.lines == 0 {
                begins = Some((file.clone(), line.prev.clone()));
            } else if line.seq.checked_sub(1) != Some(done.last_seq) {
                return Err(bad(&format!("line {} is followed by line {}", done.last_seq, line.seq)));
            } else if line.prev != done.last_hash {
                return Err(bad("the line before was changed"));
            }
            if signatures.take(&line).map_err(bad)? {
                done.checkpoints += 1;
                done.proved_seq = line.seq.saturating_sub(1);
            }
            if line.event.event == PRUNED
                && let Some((_, hash)) = line.event.detail.split_once(" ends with ")
            {
                pruned.insert(hash.to_owned(), ());
            }
            done.lines += 1;
            done.last_seq = line.seq;
            done.last_hash = hash(text);
        }
        last = file;
    }
    signatures.end(&done).map_err(|why| broken(&last, 0, why))?;
    match begins {
        Some((file, prev)) if prev != NO_LINE && !pruned.contains_key(&prev) => Err(broken(
            &file,
            1,
            "the lines before it are gone, and no line says that they were pruned".into(),
        )),
        _ => Ok(done),
    }
}

/// Signatures of a trail, line by line.
struct Signatures<'a> {
    verifier: &'a Verifier,
    /// Key of the server itself, which signed before the signer's first signature: without a signer
    /// of its own process, or in an earlier release.
    earlier: Option<Verifier>,
    first_seq: u64,
    /// Hashes that the lines since the last checkpoint name, by the line's number: the signer may
    /// have signed a place whose line a crash prevented.
    since: BTreeMap<u64, String>,
    signer_has_signed: bool,
    server_has_signed: bool,
    has_latest: bool,
}

impl<'a> Signatures<'a> {
    fn new(folder: &Path, verifier: &'a Verifier) -> io::Result<Self> {
        let earlier = match fs::read(folder.join("checkpoint.key")) {
            Ok(bytes) => {
                let key = Ed25519KeyPair::from_pkcs8(&bytes).map_err(|e| io::Error::other(e.to_string()))?;
                Some(Verifier { key: key.public_key().as_ref().to_vec(), latest: Place::default() })
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(e),
        };
        Ok(Self {
            verifier,
            earlier,
            first_seq: 0,
            since: BTreeMap::new(),
            signer_has_signed: false,
            server_has_signed: false,
            has_latest: false,
        })
    }

    /// Returns whether a line is a checkpoint, which is then good.
    fn take(&mut self, line: &Line) -> Result<bool, &'static str> {
        if self.first_seq == 0 {
            self.first_seq = line.seq;
        }
        self.since.insert(line.seq, line.prev.clone());
        self.has_latest |= place(line.seq, &line.prev) == Some(self.verifier.latest);
        if line.event.event != CHECKPOINT {
            return Ok(false);
        }
        let Some((here, checkpoint)) = checkpoint_in(line) else {
            let text = format!("{SIGNED_BY_SERVER}\n{}\n{}", line.seq, line.prev);
            let signature = data_encoding::HEXLOWER.decode(line.signature.as_bytes()).unwrap_or_default();
            let key = self.earlier.as_ref().filter(|_| !self.signer_has_signed);
            let key = key.map(|earlier| UnparsedPublicKey::new(&ED25519, &earlier.key));
            return match key.is_some_and(|key| key.verify(text.as_bytes(), &signature).is_ok()) {
                true => Ok(true),
                false => Err("the checkpoint's signature is not of this server's key"),
            };
        };
        let of_signer = self.verifier.verifies(&here, &checkpoint);
        let earlier = self.earlier.as_ref().filter(|_| !of_signer && !self.signer_has_signed);
        if !of_signer && !earlier.is_some_and(|earlier| earlier.verifies(&here, &checkpoint)) {
            return Err("the checkpoint's signature is not of this server's signer");
        }
        let before = checkpoint.before;
        let begins = if of_signer { !self.signer_has_signed } else { !self.server_has_signed };
        let known = match before.seq {
            0 => begins,
            seq if seq < self.first_seq => begins,
            seq => self.since.get(&seq).is_some_and(|prev| place(seq, prev) == Some(before)),
        };
        if !known {
            return Err("the signer signed another line before this one: lines were changed or cut, or the \
                        trail was restored from a copy");
        }
        self.signer_has_signed |= of_signer;
        self.server_has_signed |= !of_signer;
        self.since.retain(|seq, _| *seq == line.seq);
        Ok(true)
    }

    /// Checks that the trail has the place that the signer signed last.
    fn end(&self, done: &Verified) -> Result<(), String> {
        let latest = self.verifier.latest;
        let next = done.last_seq.checked_add(1).and_then(|seq| place(seq, &done.last_hash)) == Some(latest);
        if latest.seq == 0 || self.has_latest || next {
            return Ok(());
        }
        Err(format!(
            "the signer has signed line {} with other lines before it: the trail was cut or changed, or \
             restored from a copy",
            latest.seq
        ))
    }
}
