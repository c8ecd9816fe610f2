//! Images (cubins, fatbins, PTX) by content, with a folder for each client that only this server
//! opens.
//!
//! Workers get open files, and write into a pipe. This module looks at lengths and hashes, and
//! parses nothing: each worker checks an image before a driver reads it.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tracing::{debug, warn};

use super::files::{Entry, leaves_room, made, name_of, paths};
use crate::starter::code::Measured;

/// Longest image that is stored, in bytes.
const MAX_STORED: u64 = 1 << 30;
/// Images that the server takes at a time, in all and of one client.
const MAX_INCOMING: usize = 16;
const MAX_INCOMING_OF_CLIENT: usize = 2;
/// Time for a worker to write a whole image, and to write anything.
const TAKE_TIMEOUT: Duration = Duration::from_secs(60);
const READ_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });
/// Bytes that the server reads at a time.
const PIECE: usize = 1 << 20;

type Hash = [u8; 32];

/// All images, and those that are on their way.
#[derive(Debug)]
pub struct Images {
    folder: PathBuf,
    /// Bytes of the whole cache, and of one client's images.
    max: u64,
    share: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By the name of the client's folder, and the hash.
    known: HashMap<(String, Hash), Known>,
    /// Bytes of the cache that are no images.
    others: u64,
}

#[derive(Debug)]
struct Known {
    /// Disk space, which is reserved while the image is on its way.
    bytes: u64,
    /// Kept in memory: a worker can change the times of a file that it has open.
    used: SystemTime,
    whole: bool,
    /// Whether its content was found to have the hash: once, whatever offers it again.
    checked: bool,
}

impl State {
    fn bytes(&self, of: impl Fn(&str, &Known) -> bool) -> u64 {
        let counted = self.known.iter().filter(|((client, _), known)| of(client, known));
        counted.map(|(_, known)| known.bytes).fold(0, u64::saturating_add)
    }

    fn incoming(&self, of: impl Fn(&str) -> bool) -> usize {
        self.known.iter().filter(|((client, _), known)| !known.whole && of(client)).count()
    }

    /// Returns the whole images of one client or of all, those first that were unused for longest.
    fn oldest_first(&self, client: Option<&str>) -> Vec<(String, Hash)> {
        let mine = |of: &str| client.is_none_or(|client| client == of);
        let whole = self.known.iter().filter(|((of, _), known)| known.whole && mine(of));
        let mut oldest: Vec<_> = whole.map(|(key, known)| (known.used, key.clone())).collect();
        oldest.sort();
        oldest.into_iter().map(|(_, key)| key).collect()
    }
}

/// Disk space of a file of this length.
fn space(bytes: u64) -> u64 {
    bytes.next_multiple_of(4096)
}

impl Images {
    /// Reads the images of an earlier server; all of the cache may take `max` bytes, and the images
    /// of one client `share`.
    pub fn new(folder: PathBuf, max: u64, share: u64, now: SystemTime) -> Self {
        let this = Self { folder, max, share, state: Mutex::default() };
        this.scan(now);
        this
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, (client, hash): &(String, Hash)) -> PathBuf {
        self.folder.join(client).join(data_encoding::HEXLOWER.encode(hash))
    }

    /// Reads the folders again: other servers of this host may share them.
    pub(super) fn scan(&self, now: SystemTime) {
        let mut state = self.state();
        let mut before = std::mem::take(&mut state.known);
        for folder in paths(&self.folder) {
            let client = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            for path in paths(&folder) {
                let Ok(facts) = path.symlink_metadata() else { continue };
                let Measured { bytes, used, .. } = Measured::of_file(&facts);
                let name = path.file_name().unwrap_or_default().as_encoded_bytes();
                let hash = data_encoding::HEXLOWER.decode(name).ok();
                let Some(hash) = hash.and_then(|hash| Hash::try_from(hash).ok()) else {
                    // A server that was killed left it; another one may be writing a newer one.
                    if now.duration_since(used).unwrap_or_default() > TAKE_TIMEOUT * 2 {
                        remove(&path);
                    }
                    continue;
                };
                let key = (client.clone(), hash);
                let (used, checked) =
                    before.get(&key).map_or((used.min(now), false), |known| (known.used, known.checked));
                state.known.insert(key, Known { bytes, used, whole: true, checked });
            }
        }
        before.retain(|_, known| !known.whole);
        state.known.extend(before);
    }

    /// Returns all images as entries of the cache.
    pub(super) fn entries(&self) -> Vec<Entry> {
        let state = self.state();
        let whole = state.known.iter().filter(|(_, known)| known.whole);
        let entry = |(key, known): (&(String, Hash), &Known)| Entry {
            path: self.file(key),
            found: Measured { bytes: known.bytes, part: known.bytes, used: known.used },
        };
        whole.map(entry).collect()
    }

    /// Notes the bytes of the cache that are no images.
    pub(super) fn note_others(&self, bytes: u64) {
        self.state().others = bytes;
    }

    /// Opens a client's image for reading, and returns its length.
    ///
    /// Only a regular file with one name is an image; anything else in its place is deleted.
    pub fn open(&self, client: &str, hash: &Hash, now: SystemTime) -> Option<(File, u64)> {
        let key = (name_of(client), *hash);
        let path = self.file(&key);
        let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
        let found = OpenOptions::new().read(true).custom_flags(flags).open(&path).and_then(|file| {
            let facts = file.metadata()?;
            match facts.is_file() && facts.nlink() == 1 && facts.len() <= MAX_STORED {
                true => Ok((file, facts.len())),
                false => Err(nix::errno::Errno::ELOOP.into()),
            }
        });
        let mut state = self.state();
        match found {
            Ok(found) => {
                let known = Known { bytes: space(found.1), used: now, whole: true, checked: false };
                state.known.entry(key).or_insert(known).used = now;
                Some(found)
            }
            Err(e) => {
                let no_image = [nix::libc::ELOOP, nix::libc::EACCES].map(Some).contains(&e.raw_os_error());
                if no_image {
                    remove(&path);
                }
                if (no_image || e.kind() == io::ErrorKind::NotFound)
                    && state.known.get(&key).is_some_and(|known| known.whole)
                {
                    state.known.remove(&key);
                }
                None
            }
        }
    }

    /// Makes room for an image that a worker offers; `None`: the server does not want it.
    ///
    /// An image that is there already stays if its content has the hash.
    pub fn begin(
        self: &Arc<Self>,
        client: &str,
        hash: &Hash,
        bytes: u64,
        now: SystemTime,
    ) -> Option<Incoming> {
        if bytes == 0 || bytes > MAX_STORED.min(self.share) {
            return None;
        }
        let key = (name_of(client), *hash);
        let path = self.file(&key);
        if let Some((file, _)) = self.open(client, hash, now) {
            let is_checked = || self.state().known.get(&key).is_some_and(|known| known.checked);
            if is_checked() || hash_of(file).is_ok_and(|found| found == *hash) {
                self.state().known.entry(key).and_modify(|known| known.checked = true);
                return None;
            }
            self.state().known.remove(&key);
            remove(&path);
        }
        {
            let mut state = self.state();
            if state.known.contains_key(&key) || !self.make_room(&mut state, &key.0, space(bytes)) {
                return None;
            }
            state
                .known
                .insert(key.clone(), Known { bytes: space(bytes), used: now, whole: false, checked: false });
        }
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}-{n}", std::process::id()));
        let incoming = Incoming { images: self.clone(), key, bytes, temporary, path, done: false };
        made(incoming.path.parent()?).ok()?;
        Some(incoming)
    }

    /// Deletes the images that were unused for longest until `bytes` more fit; `false`: they do
    /// not.
    fn make_room(&self, state: &mut State, client: &str, bytes: u64) -> bool {
        if state.incoming(|_| true) >= MAX_INCOMING
            || state.incoming(|of| of == client) >= MAX_INCOMING_OF_CLIENT
            || !leaves_room(&self.folder, state.bytes(|_, known| !known.whole).saturating_add(bytes))
        {
            return false;
        }
        let mut mine = state.bytes(|of, _| of == client).saturating_add(bytes);
        let mut all = state.bytes(|_, _| true).saturating_add(state.others).saturating_add(bytes);
        // One pass for all that has to go, since the lock is held.
        for of in [Some(client), None] {
            let full = |mine: u64, all: u64| match of {
                Some(_) => mine > self.share,
                None => all > self.max,
            };
            let mut oldest = if full(mine, all) { state.oldest_first(of) } else { Vec::new() }.into_iter();
            while full(mine, all) {
                let Some(key) = oldest.next() else { return false };
                remove(&self.file(&key));
                let freed = state.known.remove(&key).map_or(0, |known| known.bytes);
                all = all.saturating_sub(freed);
                mine = if key.0 == client { mine.saturating_sub(freed) } else { mine };
            }
        }
        true
    }
}

/// An image that a worker may write; its room is free again when this is dropped.
#[derive(Debug)]
pub struct Incoming {
    images: Arc<Images>,
    key: (String, Hash),
    bytes: u64,
    temporary: PathBuf,
    path: PathBuf,
    done: bool,
}

impl Incoming {
    /// Reads the image from a pipe, and stores it if length and hash are those that were offered.
    ///
    /// It waits for the worker and for the disk.
    pub fn take(mut self, pipe: OwnedFd) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.temporary)?;
        let mut pipe = File::from(pipe);
        let (mut hasher, mut buffer, mut left) = (blake3::Hasher::new(), vec![0; PIECE], self.bytes);
        let until = Instant::now() + TAKE_TIMEOUT;
        loop {
            readable(&pipe, until)?;
            let got = match pipe.read(&mut buffer)? {
                0 => break,
                n => buffer.get(..n).unwrap_or_default(),
            };
            let longer = || io::Error::other("it is longer than offered");
            left = left.checked_sub(got.len() as u64).ok_or_else(longer)?;
            hasher.update(got);
            file.write_all(got)?;
        }
        if left != 0 || hasher.finalize() != blake3::Hash::from_bytes(self.key.1) {
            return Err(io::Error::other("its content is not what was offered"));
        }
        fs::rename(&self.temporary, &self.path)?;
        self.done = true;
        if let Some(known) = self.images.state().known.get_mut(&self.key) {
            known.whole = true;
        }
        Ok(())
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if !self.done {
            remove(&self.temporary);
            self.images.state().known.remove(&self.key);
        }
    }
}

/// Waits until a pipe has bytes or no writer; an error once the time is over.
fn readable(pipe: &File, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now()).min(READ_TIMEOUT);
    let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
    match poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], timeout)? {
        0 => Err(io::Error::other("the worker does not write it in time")),
        _ => Ok(()),
    }
}

fn hash_of(mut file: File) -> io::Result<Hash> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; PIECE];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(*hasher.finalize().as_bytes()),
            n => drop(hasher.update(buffer.get(..n).unwrap_or_default())),
        }
    }
}

/// Deletes a file, if it is there.
fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            warn!("cache {}: not deleted: {e}; delete it by hand", path.display());
        }
        _ => debug!("cache {}: deleted", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use nix::unistd::pipe;

    use super::*;
    use crate::clock::wall;

    const MIB: u64 = 1 << 20;

    fn images(folder: &Path, max: u64) -> Arc<Images> {
        Arc::new(Images::new(folder.into(), max, max / 4, wall()))
    }

    fn image(n: u8, bytes: u64) -> (Hash, Vec<u8>) {
        let image = vec![n; bytes as usize];
        (*blake3::hash(&image).as_bytes(), image)
    }

    /// Writes `written` as a worker that offers `bytes` bytes does.
    fn offer(
        images: &Arc<Images>,
        client: &str,
        hash: &Hash,
        bytes: u64,
        written: Vec<u8>,
    ) -> Option<io::Result<()>> {
        let incoming = images.begin(client, hash, bytes, wall())?;
        let (reader, writer) = pipe().unwrap();
        let writing = std::thread::spawn(move || drop(File::from(writer).write_all(&written)));
        let taken = incoming.take(reader);
        writing.join().unwrap();
        Some(taken)
    }

    fn on_disk(folder: &Path) -> (u64, usize) {
        let files: Vec<_> = paths(folder).iter().flat_map(|folder| paths(folder)).collect();
        let sizes = files.iter().filter_map(|file| Some(file.symlink_metadata().ok()?.blocks() * 512));
        (sizes.sum(), files.len())
    }

    #[test]
    fn a_client_fills_no_more_than_its_share_and_evicts_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let images = images(folder.path(), 100 * MIB);
        let (theirs, content) = image(200, MIB);
        offer(&images, "other", &theirs, MIB, content).unwrap().unwrap();
        for n in 0..40 {
            let (hash, image) = image(n, 10 * MIB);
            offer(&images, "vm", &hash, 10 * MIB, image).unwrap().unwrap();
            assert!(images.open("vm", &hash, wall()).is_some());
            assert!(on_disk(folder.path()).0 <= 26 * MIB, "{:?}", on_disk(folder.path()));
        }
        assert!(images.open("other", &theirs, wall()).is_some());
        assert_eq!(on_disk(folder.path()).1, 3);
        let (hash, image) = image(41, 26 * MIB);
        assert!(offer(&images, "vm", &hash, 26 * MIB, image).is_none(), "more than its share");
    }

    #[test]
    fn offers_at_a_time_reserve_their_room() {
        let folder = tempfile::tempdir().unwrap();
        let images = images(folder.path(), 100 * MIB);
        let begin = |client: &str, n| images.begin(client, &[n; 32], 20 * MIB, wall());
        let first = begin("a", 1).unwrap();
        assert!(begin("a", 1).is_none(), "the same image");
        assert!(begin("a", 2).is_none(), "no room in its share: the other is on its way");
        let others: Vec<_> = ["b", "c", "d", "e"].iter().map(|client| begin(client, 3)).collect();
        assert!(others.iter().all(Option::is_some));
        assert!(begin("f", 4).is_none(), "no room in all");
        drop(first);
        assert!(begin("f", 4).is_some());
        assert_eq!(on_disk(folder.path()), (0, 0));
        drop(others);
        let small = |n| images.begin("a", &[n; 32], MIB, wall());
        let (_one, _two) = (small(1).unwrap(), small(2).unwrap());
        assert!(small(3).is_none(), "two of one client at a time");
    }

    #[test]
    fn only_what_was_offered_is_stored() {
        let folder = tempfile::tempdir().unwrap();
        let images = images(folder.path(), 100 * MIB);
        let (other, _) = image(2, 100_000);
        let (hash, image) = image(1, 100_000);
        let mut long = image.clone();
        long.push(1);
        for (hash, written) in
            [(other, image.clone()), (hash, image[1..].to_vec()), (hash, long), (hash, Vec::new())]
        {
            offer(&images, "vm", &hash, 100_000, written).unwrap().unwrap_err();
            assert!(images.open("vm", &hash, wall()).is_none());
            assert_eq!(on_disk(folder.path()), (0, 0));
        }
        let since = Instant::now();
        let (reader, _silent) = pipe().unwrap();
        images.begin("vm", &hash, 100_000, wall()).unwrap().take(reader).unwrap_err();
        assert!((READ_TIMEOUT.as_secs()..10).contains(&since.elapsed().as_secs()), "{:?}", since.elapsed());
        offer(&images, "vm", &hash, 100_000, image.clone()).unwrap().unwrap();
        assert!(images.open("other", &hash, wall()).is_none(), "another client's");
        let (mut file, bytes) = images.open("vm", &hash, wall()).unwrap();
        let mut read = Vec::new();
        file.read_to_end(&mut read).unwrap();
        assert!(bytes == 100_000 && read == image);
        assert!(file.write_all(b"x").is_err(), "to read only");
        assert!(offer(&images, "vm", &hash, 100_000, image).is_none(), "it is there");
    }

    #[test]
    fn an_image_that_is_offered_again_is_read_once() {
        let folder = tempfile::tempdir().unwrap();
        let images = images(folder.path(), 100 * MIB);
        let (hash, content) = image(1, 1000);
        let begins = || images.begin("vm", &hash, 1000, wall()).is_some();
        let path = images.file(&(name_of("vm"), hash));
        offer(&images, "vm", &hash, 1000, content.clone()).unwrap().unwrap();
        fs::write(&path, vec![0; 1000]).unwrap();
        assert!(begins(), "its content is another: a new one comes");
        offer(&images, "vm", &hash, 1000, content).unwrap().unwrap();
        assert!(!begins());
        fs::write(&path, vec![0; 1000]).unwrap();
        assert!(!begins(), "the server does not look again");
        images.scan(wall());
        assert!(!begins());
    }

    #[test]
    fn no_other_kind_of_file_is_an_image() {
        let folder = tempfile::tempdir().unwrap();
        let images = images(folder.path(), 100 * MIB);
        let (hash, content) = image(1, 1000);
        offer(&images, "vm", &hash, 1000, content.clone()).unwrap().unwrap();
        let path = images.file(&(name_of("vm"), hash));
        let beside = folder.path().join("beside");
        fs::write(&beside, &content).unwrap();
        let make: [&dyn Fn(); 3] = [
            &|| nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
            &|| symlink(&beside, &path).unwrap(),
            &|| fs::hard_link(&beside, &path).unwrap(),
        ];
        for make in make {
            remove(&path);
            make();
            let since = Instant::now();
            assert!(images.open("vm", &hash, wall()).is_none());
            assert!(since.elapsed() < Duration::from_secs(30));
            offer(&images, "vm", &hash, 1000, content.clone()).unwrap().unwrap();
        }
        // Other content of the same name gives way to the right one.
        fs::write(&path, b"damaged").unwrap();
        offer(&images, "vm", &hash, 1000, content.clone()).unwrap().unwrap();
        assert!(fs::read(&path).unwrap() == content && beside.exists());
        remove(&path);
        fs::create_dir(&path).unwrap();
        assert!(images.open("vm", &hash, wall()).is_none());
    }

    #[test]
    fn a_later_server_knows_the_images_and_deletes_what_a_killed_one_left() {
        let folder = tempfile::tempdir().unwrap();
        let first = images(folder.path(), 100 * MIB);
        let (hash, content) = image(1, 5 * MIB);
        offer(&first, "vm", &hash, 5 * MIB, content).unwrap().unwrap();
        let left = folder.path().join(name_of("vm")).join("left");
        fs::write(&left, b"part").unwrap();
        let later = images(folder.path(), 100 * MIB);
        assert_eq!(later.state().bytes(|_, _| true), 5 * MIB);
        assert!(left.exists() && later.open("vm", &hash, wall()).is_some());
        later.scan(wall() + TAKE_TIMEOUT * 3);
        assert!(!left.exists());
        // A worker's times count for nothing, and neither does a mode.
        let file = later.open("vm", &hash, wall()).unwrap().0;
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o0)).unwrap();
        let root = nix::unistd::geteuid().is_root();
        assert_eq!(later.open("vm", &hash, wall()).is_some(), root);
    }
}
