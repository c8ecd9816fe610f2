//! The client's images that the server keeps: this worker asks for them, and offers new ones.
//!
//! The server alone opens and writes files. It hands over an open file or the end of a pipe, and
//! this module believes neither: the content must have the hash.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use gpusession_proto::supervise::FromWorker;

use crate::supervise::Supervisor;

/// Longest image, in bytes.
pub const MAX_IMAGE: u64 = 4 << 30;
/// Time after which a question counts as answered with no: the server may be an earlier release.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Questions without an answer in a row, after which this worker asks no more.
const MAX_UNANSWERED: u32 = 3;
/// Images that wait to be offered; further ones are not kept.
const MAX_WAITING: usize = 8;

pub type Hash = [u8; 32];

/// The descriptor of an answer that says yes and, of an image, its length.
type Found = Option<(OwnedFd, u64)>;

/// Questions to the server about images.
pub struct ImageStore {
    supervisor: Arc<Supervisor>,
    state: Mutex<State>,
    changed: Condvar,
    queue: OnceLock<SyncSender<(Hash, Arc<Vec<u8>>)>>,
}

#[derive(Default)]
struct State {
    /// Serial number of the last question.
    asked: u64,
    /// Open questions, and answers that no thread has fetched yet.
    open: HashMap<u64, Option<Found>>,
    /// Questions without an answer since the last one with an answer.
    unanswered: u32,
    /// Images that are waiting or being written.
    offering: usize,
}

impl ImageStore {
    /// Starts without a question.
    pub fn new(supervisor: Arc<Supervisor>) -> Self {
        Self { supervisor, state: Mutex::default(), changed: Condvar::new(), queue: OnceLock::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an image of this hash, if the server has it.
    pub fn find(&self, hash: &Hash) -> Option<Vec<u8>> {
        let (file, bytes) = self.ask(|serial| FromWorker::ImageWanted { serial, hash: *hash })?;
        if bytes > MAX_IMAGE {
            return None;
        }
        // A private copy: another process may change the file.
        let mut image = Vec::with_capacity(bytes as usize);
        File::from(file).take(bytes + 1).read_to_end(&mut image).ok()?;
        let whole = image.len() as u64 == bytes && blake3::hash(&image) == blake3::Hash::from_bytes(*hash);
        whole.then_some(image)
    }

    /// Asks, and waits for the answer.
    fn ask(&self, question: impl FnOnce(u64) -> FromWorker) -> Found {
        let mut state = self.state();
        if state.unanswered >= MAX_UNANSWERED {
            return None;
        }
        state.asked += 1;
        let serial = state.asked;
        state.open.insert(serial, None);
        drop(state);
        let told = self.supervisor.report(&question(serial));
        let until = Instant::now() + if told { ANSWER_TIMEOUT } else { Duration::ZERO };
        let mut state = self.state();
        loop {
            if matches!(state.open.get(&serial), Some(Some(_))) {
                state.unanswered = 0;
                return state.open.remove(&serial).flatten().flatten();
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.open.remove(&serial);
                state.unanswered += 1;
                return None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records the server's answer; one to no open question is dropped.
    pub fn answer(&self, serial: u64, found: Found) {
        if let Some(open) = self.state().open.get_mut(&serial) {
            *open = Some(found);
        }
        self.changed.notify_all();
    }

    /// Answers all open questions with no, since the server that had them is gone.
    pub fn taken_over(&self) {
        let mut state = self.state();
        for open in state.open.values_mut() {
            open.get_or_insert(None);
        }
        // The next server answers.
        state.unanswered = 0;
        drop(state);
        self.changed.notify_all();
    }

    /// Offers an image from a thread of its own, so that no caller waits for a disk.
    pub fn offer(self: &Arc<Self>, hash: Hash, image: Arc<Vec<u8>>) {
        let queue = self.queue.get_or_init(|| {
            let (sender, receiver) = sync_channel(MAX_WAITING);
            let this = self.clone();
            // Without the thread, the queue is closed, and the server keeps no image.
            let _ = std::thread::Builder::new().name("images".into()).spawn(move || this.run(&receiver));
            sender
        });
        self.state().offering += 1;
        if queue.try_send((hash, image)).is_err() {
            self.offered();
        }
    }

    fn offered(&self) {
        self.state().offering -= 1;
        self.changed.notify_all();
    }

    fn run(&self, queue: &Receiver<(Hash, Arc<Vec<u8>>)>) {
        for (hash, image) in queue {
            let bytes = image.len() as u64;
            if let Some((pipe, _)) = self.ask(|serial| FromWorker::ImageOffered { serial, hash, bytes }) {
                // A server that does not want the rest only costs time later.
                let _: io::Result<()> = File::from(pipe).write_all(&image);
            }
            self.offered();
        }
    }

    /// Waits until the server has all offered images, at most until `deadline`.
    pub fn settle(&self, deadline: Instant) {
        let mut state = self.state();
        while state.offering > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io::Seek as _;

    use super::*;
    use crate::supervise::tests::{Peer, pair};

    fn store() -> (Arc<ImageStore>, Peer) {
        let (supervisor, peer) = pair();
        (Arc::new(ImageStore::new(supervisor)), peer)
    }

    fn file(content: &[u8]) -> OwnedFd {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file.rewind().unwrap();
        file.into()
    }

    fn find(store: &Arc<ImageStore>, hash: Hash) -> std::thread::JoinHandle<Option<Vec<u8>>> {
        let store = store.clone();
        std::thread::spawn(move || store.find(&hash))
    }

    fn wanted(peer: &Peer) -> u64 {
        match peer.next() {
            FromWorker::ImageWanted { serial, .. } => serial,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_the_content_of_the_hash_is_an_image() {
        let (store, peer) = store();
        let image = b"an image".to_vec();
        let hash = *blake3::hash(&image).as_bytes();
        let (_reader, pipe) = nix::unistd::pipe().unwrap();
        let folder = File::open("/tmp").unwrap().into();
        for (answer, good) in [
            (Some((file(&image), 8)), true),
            (None, false),
            (Some((file(b"an Image"), 8)), false),
            (Some((file(b"an image and more"), 8)), false),
            (Some((file(b"an"), 8)), false),
            (Some((file(&image), u64::MAX)), false),
            (Some((pipe, 8)), false),
            (Some((folder, 8)), false),
        ] {
            let finding = find(&store, hash);
            let serial = wanted(&peer);
            store.answer(serial + 9, None);
            store.answer(serial, answer);
            assert_eq!(finding.join().unwrap(), good.then(|| image.clone()));
        }
    }

    #[test]
    fn a_server_that_does_not_answer_is_asked_three_times() {
        let (store, peer) = store();
        let since = Instant::now();
        let all: Vec<_> = (0..3).map(|n| find(&store, [n; 32])).collect();
        assert!(all.into_iter().all(|one| one.join().unwrap().is_none()));
        assert!((2..30).contains(&since.elapsed().as_secs()), "{:?}", since.elapsed());
        let serials: HashSet<_> = (0..3).map(|_| wanted(&peer)).collect();
        assert_eq!(serials.len(), 3);
        assert_eq!(store.find(&[9; 32]), None);
        assert!(peer.silent());
        assert!(since.elapsed().as_secs() < 30);
        // The next server is asked again.
        store.taken_over();
        let finding = find(&store, [9; 32]);
        store.answer(wanted(&peer), None);
        assert_eq!(finding.join().unwrap(), None);
    }

    #[test]
    fn another_server_answers_no_open_question() {
        let (store, peer) = store();
        let finding = find(&store, [1; 32]);
        let serial = wanted(&peer);
        let since = Instant::now();
        store.taken_over();
        assert_eq!(finding.join().unwrap(), None);
        assert!(since.elapsed() < ANSWER_TIMEOUT);
        store.answer(serial, None);
        let finding = find(&store, *blake3::hash(b"next").as_bytes());
        store.answer(wanted(&peer), Some((file(b"next"), 4)));
        assert_eq!(finding.join().unwrap(), Some(b"next".to_vec()));
    }

    #[test]
    fn an_offered_image_goes_through_the_pipe_and_no_caller_waits() {
        let (store, peer) = store();
        let image = Arc::new(vec![7; 3 << 20]);
        let offered = || match peer.next() {
            FromWorker::ImageOffered { serial, hash, bytes: 0x30_0000 } => (serial, hash),
            other => panic!("{other:?}"),
        };
        store.offer([0; 32], image.clone());
        let mut present = offered();
        // Eight of these wait, and the others are left out.
        for n in 1..40 {
            store.offer([n; 32], image.clone());
        }
        for n in 0..=MAX_WAITING {
            let (serial, hash) = present;
            assert_eq!(hash, [n as u8; 32]);
            if n % 2 == 1 {
                store.answer(serial, None);
            } else {
                let (reader, writer) = nix::unistd::pipe().unwrap();
                store.answer(serial, Some((writer, 0)));
                let mut got = Vec::new();
                File::from(reader).read_to_end(&mut got).unwrap();
                assert!(got == *image, "{} bytes", got.len());
            }
            if n < MAX_WAITING {
                present = offered();
            }
        }
        store.settle(Instant::now() + ANSWER_TIMEOUT);
        assert!(peer.silent());
        assert_eq!(store.state().offering, 0);
    }
}
