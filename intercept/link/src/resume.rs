//! Handshake with which a program's connection comes back to its worker after a break.
//!
//! The worker begins with a nonce ([`op::CHALLENGE`]). The program answers with what it has and
//! with a proof ([`op::RESUME`]). The worker fences the earlier connection and answers likewise
//! ([`op::WELCOME`]); then both ends send what the other one lacks. These frames are in no log.
//!
//! The key comes from the greeting's reply, and never travels again. A proof covers both nonces,
//! the TLS session and the attempt's number, so a recorded one is worthless.

use std::io;
use std::time::{Duration, Instant};

use gpusession_proto::frame::{HEADER, Header, Reader, Writer, op};
use gpusession_proto::preface::{Refusal, refusal_len};
use ring::rand::{SecureRandom, SystemRandom};

use crate::transport::{Transport, Wait};

/// Time in which the handshake has to end.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest body of these frames, in bytes.
const MAX_BODY: usize = 256;

type Nonce = [u8; 32];

/// Key of a session, which only its program and its worker know.
pub struct SessionKey([u8; 32]);

impl SessionKey {
    /// Derives the key from the secret of the greeting's reply.
    pub fn new(secret: &[u8; 32]) -> Self {
        Self(blake3::derive_key("gpusession data plane 4 session", secret))
    }
}

/// Position of one end in the logs of both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Number of the latest frame that it has received.
    pub received: u64,
    /// Number of the first frame that it can send again.
    pub first: u64,
    /// Number of the next frame that it sends.
    pub next: u64,
}

impl Counts {
    /// Returns `true` if this end can continue where `received` frames have arrived at the other.
    pub fn fits(&self, received: u64) -> bool {
        self.first <= received.saturating_add(1) && received < self.next
    }

    pub(crate) fn write(&self, w: &mut Writer<'_>) {
        [self.received, self.first, self.next].into_iter().for_each(|count| w.word(count));
    }

    pub(crate) fn read(r: &mut Reader<'_>) -> io::Result<Self> {
        let mut word = || r.word().map_err(io::Error::other);
        Ok(Self { received: word()?, first: word()?, next: word()? })
    }
}

/// Text of a refusal of two ends whose counts do not fit.
pub const ELSEWHERE: &str =
    "the program is not where its worker left it: restored from a snapshot, or a copy of another process?";

/// The worker's choice among the connections of one lane: that of the highest attempt that was
/// proven counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Fence(u32);

impl Fence {
    /// Starts with the lane's first connection.
    pub fn new(attempt: u32) -> Self {
        Self(attempt)
    }

    /// Returns `true` if a connection has come.
    pub fn is_claimed(&self) -> bool {
        self.0 > 0
    }

    /// Returns `true` if the connection of this attempt counts.
    pub fn admits(&self, attempt: u32) -> bool {
        self.0 == attempt
    }

    /// Lets a proven attempt take the place of earlier ones; otherwise the reason for a refusal.
    pub fn pass(&mut self, attempt: u32, mine: &Counts, theirs: &Counts) -> Result<(), &'static str> {
        if attempt <= self.0 {
            return Err("a later connection has taken its place");
        }
        if !mine.fits(theirs.received) || !theirs.fits(mine.received) {
            return Err(ELSEWHERE);
        }
        self.0 = attempt;
        Ok(())
    }
}

/// An end of the handshake.
#[derive(Clone, Copy)]
enum Role {
    Program = 1,
    Worker = 2,
}

/// One attempt to bring a lane back.
pub struct Attempt<'a> {
    /// Key of the session, which proves both ends.
    pub key: &'a SessionKey,
    /// Id of the worker that the connection names.
    pub worker: [u8; 16],
    /// Number of the lane; 0 is the log.
    pub lane: u16,
    /// Number of the attempt, so that no answer serves two.
    pub number: u32,
}

/// A proven wish of the program to come back, from [`Attempt::challenge`].
pub struct Claim {
    nonces: [Nonce; 2],
    /// The program's position.
    pub counts: Counts,
}

impl Attempt<'_> {
    fn proof(
        &self,
        transport: &Transport,
        role: Role,
        nonces: &[Nonce; 2],
        counts: &Counts,
    ) -> io::Result<blake3::Hash> {
        let mut hasher = blake3::Hasher::new_keyed(&self.key.0);
        hasher.update(&[role as u8]).update(&self.worker).update(&self.lane.to_le_bytes());
        hasher.update(&self.number.to_le_bytes()).update(&nonces[0]).update(&nonces[1]);
        hasher.update(&transport.exporter()?);
        for count in [counts.received, counts.first, counts.next] {
            hasher.update(&count.to_le_bytes());
        }
        Ok(hasher.finalize())
    }

    /// The program's part, up to the worker's welcome: returns the worker's position.
    ///
    /// From the call on, the program takes no frame of an earlier connection.
    pub fn come_back(&self, transport: &Transport, mine: &Counts) -> io::Result<Counts> {
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        let challenge = receive(transport, op::CHALLENGE, deadline)?;
        let nonces = [nonce_of(&mut Reader::new(&challenge))?, nonce()?];
        let proof = self.proof(transport, Role::Program, &nonces, mine)?;
        transport.send(&frame(op::RESUME, |w| {
            w.bytes(&nonces[1]);
            mine.write(w);
            w.bytes(proof.as_bytes());
        }))?;
        let welcome = receive(transport, op::WELCOME, deadline)?;
        let mut r = Reader::new(&welcome);
        let theirs = Counts::read(&mut r)?;
        if proof_of(&mut r)? != self.proof(transport, Role::Worker, &nonces, &theirs)? {
            return Err(io::Error::other("the peer does not have the worker's key"));
        }
        if !mine.fits(theirs.received) || !theirs.fits(mine.received) {
            return Err(io::Error::other(ELSEWHERE));
        }
        Ok(theirs)
    }

    /// The worker's part up to the program's proof; nothing changes before it.
    pub fn challenge(&self, transport: &Transport) -> io::Result<Claim> {
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        let mine = nonce()?;
        transport.send(&frame(op::CHALLENGE, |w| w.bytes(&mine)))?;
        let resume = receive(transport, op::RESUME, deadline)?;
        let mut r = Reader::new(&resume);
        let nonces = [mine, nonce_of(&mut r)?];
        let counts = Counts::read(&mut r)?;
        if proof_of(&mut r)? != self.proof(transport, Role::Program, &nonces, &counts)? {
            return Err(io::Error::other("a connection without the key of the worker's program"));
        }
        Ok(Claim { nonces, counts })
    }

    /// Returns the frame that ends the handshake.
    pub fn welcome(&self, transport: &Transport, claim: &Claim, mine: &Counts) -> io::Result<Vec<u8>> {
        let proof = self.proof(transport, Role::Worker, &claim.nonces, mine)?;
        Ok(frame(op::WELCOME, |w| {
            mine.write(w);
            w.bytes(proof.as_bytes());
        }))
    }
}

fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 32];
    SystemRandom::new().fill(&mut nonce).map_err(|_| io::Error::other("no random bytes"))?;
    Ok(nonce)
}

fn nonce_of(r: &mut Reader<'_>) -> io::Result<Nonce> {
    let bytes = r.bytes().map_err(io::Error::other)?;
    bytes.try_into().map_err(|_| io::Error::other("a nonce of another length"))
}

/// Reads a proof; hashes compare in constant time.
fn proof_of(r: &mut Reader<'_>) -> io::Result<blake3::Hash> {
    nonce_of(r).map(blake3::Hash::from_bytes)
}

/// Returns a frame that is in no log.
pub fn frame(op: u16, body: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
    let mut header = Header::empty();
    header.op = op.into();
    let mut bytes = Vec::new();
    let mut w = Writer::new(&mut bytes, &header);
    body(&mut w);
    w.finish();
    bytes
}

/// Returns a frame that tells how many frames have arrived.
pub fn ack(received: u64) -> [u8; HEADER] {
    ack_held(received, 0)
}

/// As [`ack`], for chunks; `hold` is the number of the hold that is in force, or 0.
pub fn ack_held(received: u64, hold: u64) -> [u8; HEADER] {
    let mut header = Header::empty();
    (header.op, header.ack, header.ctx) = (op::ACK.into(), received.into(), hold.into());
    zerocopy::transmute!(header)
}

fn receive(transport: &Transport, expected: u16, deadline: Instant) -> io::Result<Vec<u8>> {
    let exactly = |mut buf: &mut [u8]| -> io::Result<()> {
        while !buf.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            match transport.recv(buf, Wait::AtMost(Duration::ZERO, left)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => buf = &mut buf[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(io::ErrorKind::TimedOut.into()),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    };
    // A refusal may be shorter than a header.
    let mut head = [0; HEADER];
    exactly(&mut head[..4])?;
    if let Some(len) = refusal_len([head[0], head[1], head[2], head[3]]) {
        let mut refusal = head[..4].to_vec();
        refusal.resize(4 + len, 0);
        exactly(&mut refusal[4..])?;
        return Err(
            Refusal::read(&refusal).map_or_else(|| io::ErrorKind::InvalidData.into(), io::Error::other)
        );
    }
    exactly(&mut head[4..])?;
    let header = Header::parse(&head).map_err(io::Error::other)?;
    if header.op.get() != expected || header.body_len() > MAX_BODY {
        return Err(io::Error::other("an unexpected frame in the handshake"));
    }
    let mut body = vec![0; header.body_len()];
    exactly(&mut body)?;
    Ok(body)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    const SECRET: [u8; 32] = [7; 32];

    fn transports() -> [Transport; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [ours, listener.accept().unwrap().0].map(|socket| Transport::plain(socket).unwrap())
    }

    fn attempt(key: &SessionKey, number: u32) -> Attempt<'_> {
        Attempt { key, worker: [1; 16], lane: 0, number }
    }

    fn counts(received: u64, first: u64, next: u64) -> Counts {
        Counts { received, first, next }
    }

    /// Lets a program come back with these positions; returns what each end says.
    fn meet(program: Attempt<'_>, mine: Counts, theirs: Counts) -> (io::Result<Counts>, io::Result<Counts>) {
        let [ours, worker_end] = transports();
        std::thread::scope(|scope| {
            let worker = scope.spawn(move || {
                let key = SessionKey::new(&SECRET);
                let attempt = attempt(&key, 2);
                let claim = attempt.challenge(&worker_end)?;
                worker_end.send(&attempt.welcome(&worker_end, &claim, &theirs)?)?;
                Ok(claim.counts)
            });
            let said = program.come_back(&ours, &mine);
            // As a program that gives up.
            ours.shutdown();
            (said, worker.join().unwrap())
        })
    }

    #[test]
    fn both_ends_learn_where_the_other_one_is() {
        let key = SessionKey::new(&SECRET);
        let (mine, theirs) = (counts(5, 3, 9), counts(4, 2, 6));
        let (said, heard) = meet(attempt(&key, 2), mine, theirs);
        assert_eq!((said.unwrap(), heard.unwrap()), (theirs, mine));
    }

    #[test]
    fn without_key_or_with_another_attempt_nothing_is_proven() {
        let wrong = SessionKey::new(&[8; 32]);
        let key = SessionKey::new(&SECRET);
        let other_lane = Attempt { lane: 3, ..attempt(&key, 2) };
        let other_worker = Attempt { worker: [2; 16], ..attempt(&key, 2) };
        for program in [attempt(&wrong, 2), attempt(&key, 1), other_lane, other_worker] {
            let (said, heard) = meet(program, counts(5, 3, 9), counts(4, 2, 6));
            assert!(heard.unwrap_err().to_string().contains("without the key"));
            assert!(said.is_err());
        }
    }

    #[test]
    fn a_recorded_handshake_is_worthless() {
        let key = SessionKey::new(&SECRET);
        let attempt = attempt(&key, 2);
        // A program's answer to another challenge.
        let recorded = {
            let [ours, theirs] = transports();
            theirs.send(&frame(op::CHALLENGE, |w| w.bytes(&[9; 32]))).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| attempt.come_back(&ours, &counts(5, 3, 9)).unwrap_err());
                let body = receive(&theirs, op::RESUME, Instant::now() + HANDSHAKE_TIMEOUT).unwrap();
                theirs.shutdown();
                body
            })
        };
        let [ours, theirs] = transports();
        ours.send(&frame(op::RESUME, |w| w.words(&recorded))).unwrap();
        assert!(attempt.challenge(&theirs).err().unwrap().to_string().contains("without the key"));
    }

    #[test]
    fn counts_that_do_not_fit_are_refused() {
        let key = SessionKey::new(&SECRET);
        // The worker has more than was sent, or needs what is gone; or the program does.
        for (mine, theirs) in [
            (counts(5, 3, 9), counts(9, 2, 6)),
            (counts(5, 3, 9), counts(1, 2, 6)),
            (counts(6, 3, 9), counts(4, 2, 6)),
            (counts(5, 3, 9), counts(4, 7, 9)),
        ] {
            let (said, _) = meet(attempt(&key, 2), mine, theirs);
            assert_eq!(said.unwrap_err().to_string(), ELSEWHERE, "{mine:?} {theirs:?}");
        }
    }

    #[test]
    fn a_refusal_comes_in_place_of_the_challenge() {
        use gpusession_proto::preface::{Code, refusal};
        let key = SessionKey::new(&SECRET);
        let [ours, theirs] = transports();
        theirs.send(&refusal(Code::Gone, "its lease ended")).unwrap();
        theirs.shutdown();
        let refused = attempt(&key, 2).come_back(&ours, &counts(5, 3, 9)).unwrap_err();
        let refused = refused.downcast::<Refusal>().unwrap();
        assert_eq!((refused.code, &refused.reason[..]), (Code::Gone, "its lease ended"));
    }
}
