//! The life of a worker: get ready, admit one process, serve it, exit.

use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use gpusession_link::tls::fingerprint;
use gpusession_link::transport::{Transport, Wait};
use gpusession_link::worker_end::WorkerEnd;
use gpusession_proto::frame::{HEADER, Header, Reader, ability, library_ability, op};
use gpusession_proto::preface::{self, Code, LEN, Preface};
use gpusession_proto::supervise::{
    ClientProcess, FromWorker, Isolation, MoveFailed, Start, ToWorker, Unshared,
};
use gpusession_proto::ticket::Ticket;
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::activity::Activity;
use crate::admission::Question;
use crate::containment::{self, Calls};
use crate::contexts::Contexts;
use crate::driver::{Driver, check, check_connected, status};
use crate::ops::share;
use crate::output::Output;
use crate::park;
use crate::quota::Quota;
use crate::scrub;
use crate::session::Session;
use crate::supervise::Supervisor;

/// Longest silence of a peer during the handshake and the greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of windows that a client may offer.
const MAX_WINDOWS: u64 = 64;
/// `CUDA_ERROR_DEVICE_UNAVAILABLE`: a limit refuses the program.
const DEVICE_UNAVAILABLE: i32 = 46;
/// Longest greeting, in bytes: a ticket and a few words.
const MAX_GREETING: usize = 4096;

struct Worker {
    supervisor: Arc<Supervisor>,
    driver: &'static Driver,
    start: Start,
    tls: Arc<ServerConfig>,
    output: Arc<Output>,
    quota: Arc<Quota>,
    contexts: Mutex<Option<Contexts>>,
    session: OnceLock<Arc<Session>>,
    seal: Question,
    admission: Question,
    /// Restrictions of `isolation` that this host does not support.
    lacking: Vec<String>,
}

/// Serves the supervisor until it stops the worker, or the client's process exits.
pub fn run() -> ExitCode {
    let supervisor = match Supervisor::inherited() {
        Ok(supervisor) => Arc::new(supervisor),
        Err(e) => {
            eprintln!("gpuserver-worker: no supervision socket: {e}; only gpuserver starts workers");
            return ExitCode::from(1);
        }
    };
    let worker = match prepare(&supervisor) {
        Ok(Some(worker)) => Arc::new(worker),
        Ok(None) => return ExitCode::SUCCESS,
        Err(reason) => {
            supervisor.report(&FromWorker::Failed { reason });
            return ExitCode::from(3);
        }
    };
    loop {
        match supervisor.receive() {
            Ok(Some((ToWorker::Adopt { number, preface, peer }, Some(socket)))) => {
                let worker = worker.clone();
                let serve = move || {
                    if let Err(e) = worker.adopt(number, &preface, socket) {
                        let reason = format!("{peer}: {e}");
                        worker.supervisor.report(&FromWorker::Refused { number, reason });
                    }
                };
                if let Err(e) = std::thread::Builder::new().name("connection".into()).spawn(serve) {
                    let reason = format!("cannot start a thread for the connection: {e}");
                    supervisor.report(&FromWorker::Refused { number, reason });
                }
            }
            Ok(Some((ToWorker::MemoryGranted { device, serial, bytes, left }, _))) => {
                worker.quota.granted(device, serial, bytes, left);
            }
            Ok(Some((ToWorker::MemoryRecall, _))) => worker.quota.recall(),
            Ok(Some((ToWorker::Opened { refused }, _))) => worker.seal.answer(refused),
            Ok(Some((ToWorker::Admission { refused }, _))) => worker.admission.answer(refused),
            Ok(Some((ToWorker::TakenOver, _))) => worker.taken_over(),
            Ok(Some((ToWorker::ShareAsked { number, name }, _))) => {
                let refused = |why| FromWorker::ShareGiven { number, given: Err(why) };
                let Some(session) = worker.session.get().cloned() else {
                    supervisor.report(&refused(Unshared::Unknown));
                    continue;
                };
                // A thread of its own, because the driver may wait for the program's other calls.
                let give = move || share::give(&session, number, &name);
                if std::thread::Builder::new().name("share".into()).spawn(give).is_err() {
                    supervisor.report(&refused(Unshared::Busy));
                }
            }
            Ok(Some((ToWorker::ShareGranted { serial, given, count }, descriptor))) => {
                if let Some(session) = worker.session.get() {
                    session.shares.granted(serial, given, descriptor, count);
                }
            }
            Ok(Some((ToWorker::Image { serial, bytes }, file))) => {
                worker.image_answer(serial, file.zip(bytes));
            }
            Ok(Some((ToWorker::ImageRoom { serial, room }, pipe))) => {
                worker.image_answer(serial, pipe.filter(|_| room).map(|pipe| (pipe, 0)));
            }
            Ok(Some((ToWorker::ShareInherited { worker: id, object }, _))) => {
                if let Some(session) = worker.session.get().cloned() {
                    // A thread of its own, because this one receives the supervisor's answer.
                    let inherit = move || session.shares.inherit(&(id, object));
                    let _ = std::thread::Builder::new().name("share".into()).spawn(inherit);
                }
            }
            Ok(Some((ToWorker::ShareLost { worker: id }, _))) => {
                if let Some(session) = worker.session.get() {
                    session.shared_events.abandon(&id);
                    session.shares.lost(id);
                }
            }
            Ok(Some((ToWorker::Stop { reason }, _))) => {
                // A thread of its own, so that this one receives the supervisor's next messages.
                let (stopping, why) = (worker.clone(), reason.clone());
                let stop = move || stopping.end(&why);
                if std::thread::Builder::new().name("stop".into()).spawn(stop).is_err() {
                    worker.end(&reason);
                }
            }
            Ok(Some((ToWorker::Exit, _))) => {
                if let Some(session) = worker.session.get() {
                    session.may_exit();
                }
            }
            Ok(Some((ToWorker::Pause, _))) => match worker.session.get() {
                Some(session) => session.replay.pause(session.supervisor()),
                None => drop(supervisor.report(&FromWorker::Paused { quiet: false })),
            },
            Ok(Some((ToWorker::Resume, _))) => {
                if let Some(session) = worker.session.get() {
                    session.replay.resume();
                }
            }
            Ok(Some((ToWorker::MoveOut { limit_ms }, _))) => worker.move_memory(Some(limit_ms)),
            Ok(Some((ToWorker::MoveBack, _))) => worker.move_memory(None),
            Ok(Some(_)) => {}
            Ok(None) => worker.end("the GPU server was stopped"),
            Err(e) => worker.end(&format!("supervision socket: {e}")),
        }
    }
}

fn prepare(supervisor: &Arc<Supervisor>) -> Result<Option<Worker>, String> {
    let start = match supervisor.receive() {
        Ok(Some((ToWorker::Start(start), _))) => start,
        Ok(Some(_)) => return Err("supervision socket: the first message was not Start".into()),
        Ok(None) => return Ok(None),
        Err(e) => return Err(format!("supervision socket: {e}")),
    };
    let lacking = match start.isolation {
        Isolation::Off => Vec::new(),
        Isolation::Try | Isolation::Require => {
            containment::before_driver(&(&start).into(), containment::landlock())
        }
    };
    let output = Output::redirect().map_err(|e| format!("cannot redirect the output: {e}"))?;
    let driver = Driver::load(Path::new(&start.driver))?;
    let mut cuda_version = 0;
    // SAFETY: the out pointer is valid; this call works before cuInit.
    check(unsafe { (driver.call.cuDriverGetVersion)(&mut cuda_version) })
        .map_err(|s| format!("cuDriverGetVersion: CUDA error {s}"))?;
    let contexts = match start.warm {
        true => Some(warm(driver, &start, supervisor, lacking.clone())?),
        false => None,
    };
    if let Some(contexts) = contexts.as_ref().filter(|_| start.verify_memory) {
        for sampled in scrub::sample(driver, contexts) {
            supervisor.report(&sampled);
        }
    }
    let (tls, fingerprint) = identity().map_err(|e| format!("cannot create a certificate: {e}"))?;
    let cuda_version = cuda_version as u32;
    supervisor.report(&FromWorker::Ready { fingerprint, cuda_version, parks: true });
    Ok(Some(Worker {
        quota: Arc::new(Quota::new(supervisor.clone(), &start.devices)),
        supervisor: supervisor.clone(),
        driver,
        start,
        tls,
        output: Arc::new(output),
        contexts: Mutex::new(contexts),
        session: OnceLock::new(),
        seal: Question::default(),
        admission: Question::default(),
        lacking,
    }))
}

/// Creates the contexts, then gives up the rights that only the driver's start needed.
fn warm(
    driver: &Driver,
    start: &Start,
    supervisor: &Supervisor,
    mut lacking: Vec<String>,
) -> Result<Contexts, String> {
    // SAFETY: cuInit takes only flags, which must be 0.
    check_connected(|| unsafe { (driver.call.cuInit)(0) }).map_err(|s| format!("cuInit: CUDA error {s}"))?;
    let contexts = Contexts::warm(driver, &start.devices)?;
    // A driver that does not find the MPS daemon continues without it, and without its limits.
    if start.mps && !contexts.under_mps(driver) {
        return Err("the MPS control daemon of this GPU does not answer: no program runs without it; start the program again".into());
    }
    if start.isolation == Isolation::Off {
        return Ok(contexts);
    }
    let calls = if start.mps { Calls::Mps } else { Calls::Own };
    lacking.extend(containment::before_client(calls, containment::landlock()).err());
    if start.isolation == Isolation::Require && !lacking.is_empty() {
        return Err(format!(
            "isolation = \"require\": not possible on this host: {}; isolation = \"try\" continues without",
            lacking.join("; ")
        ));
    }
    supervisor.report(&FromWorker::Contained { lacking });
    Ok(contexts)
}

/// Creates a key and a certificate that live as long as this worker.
pub fn identity() -> Result<(Arc<ServerConfig>, [u8; 32]), Box<dyn std::error::Error>> {
    let key = rcgen::KeyPair::generate()?;
    let certificate = rcgen::CertificateParams::new(vec!["worker".into()])?.self_signed(&key)?;
    let der: CertificateDer<'static> = certificate.der().clone();
    let fingerprint = fingerprint(&der);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![der], PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())))?;
    // Each reconnect is a new TLS session.
    config.send_tls13_tickets = 0;
    Ok((Arc::new(config), fingerprint))
}

impl Worker {
    /// Repeats open questions to the next supervisor.
    fn taken_over(&self) {
        self.seal.ask_again(&self.supervisor);
        self.admission.ask_again(&self.supervisor);
        self.quota.ask_again();
        let Some(session) = self.session.get() else { return };
        session.shares.tell_again();
        if let Some(store) = session.images.store() {
            store.taken_over();
        }
    }

    /// Moves device memory to host memory within this time for the lock, or back, and answers.
    ///
    /// A thread of its own, since gigabytes take seconds.
    fn move_memory(&self, limit_ms: Option<u32>) {
        let (supervisor, driver) = (self.supervisor.clone(), self.driver);
        let work = move || {
            let moved = limit_ms.map_or_else(|| park::back(driver), |limit| park::out(driver, limit));
            supervisor.report(&FromWorker::Moved { failed: moved.err() });
        };
        if let Err(e) = std::thread::Builder::new().name("park".into()).spawn(work) {
            let failed = MoveFailed { call: format!("thread: {e}"), status: status::OPERATING_SYSTEM };
            self.supervisor.report(&FromWorker::Moved { failed: Some(failed) });
        }
    }

    fn image_answer(&self, serial: u64, found: Option<(OwnedFd, u64)>) {
        if let Some(store) = self.session.get().and_then(|session| session.images.store()) {
            store.answer(serial, found);
        }
    }

    fn end(&self, reason: &str) -> ! {
        if let Some(session) = self.session.get() {
            session.end(reason)
        }
        self.supervisor.report(&FromWorker::Ended { reason: reason.into(), quiet: true });
        // SAFETY: exits the process without running the driver's exit handlers.
        unsafe { libc::_exit(0) }
    }

    fn adopt(&self, number: u64, preface: &[u8], socket: OwnedFd) -> io::Result<()> {
        let (preface, transport, control) = accept(&self.start, &self.tls, preface, socket)?;
        if preface.resumes() {
            return self.resume(number, &preface, transport, &control);
        }
        let (header, body) = greeting(&transport)?;
        control.set_read_timeout(None)?;
        match header.op.get() {
            op::HELLO if preface.lane.get() == 0 => {
                self.hello(number, preface.attempt.get(), transport, &header, &body)
            }
            op::LANE if preface.lane.get() != 0 => {
                let Some(session) = self.session.get() else {
                    return Err(refuse(
                        &transport,
                        "lane before the greeting of the first connection".into(),
                    ));
                };
                let lane = preface.lane.get();
                if !proves(&body, &session.lane_secret, lane) {
                    return Err(refuse(&transport, "lane without the secret of the first one".into()));
                }
                let (transport, attempt) = (Arc::new(transport), preface.attempt.get());
                if !session.lanes.claim(lane, attempt, &transport) {
                    return Err(refuse(&transport, format!("lane {lane} does not exist or is open already")));
                }
                self.supervisor.report(&FromWorker::Admitted { number, lane });
                session.lanes.serve(session.driver, &session.contexts, lane, attempt, &transport)
            }
            _ => Err(io::Error::other("unexpected first frame")),
        }
    }

    /// Lets the program come back on a new connection.
    fn resume(
        &self,
        number: u64,
        preface: &Preface,
        transport: Transport,
        control: &TcpStream,
    ) -> io::Result<()> {
        let Some(session) = self.session.get() else {
            return Err(refuse(&transport, "this worker has no such connection to bring back".into()));
        };
        control.set_read_timeout(None)?;
        let (lane, attempt) = (preface.lane.get(), preface.attempt.get());
        if lane == 0 {
            session.replies.end.resume(attempt, transport)?;
            self.supervisor.report(&FromWorker::Admitted { number, lane });
            return Ok(());
        }
        let transport = Arc::new(transport);
        session.lanes.come_back(&session.replies.end.attempt(lane, attempt), &transport)?;
        self.supervisor.report(&FromWorker::Admitted { number, lane });
        session.lanes.serve(session.driver, &session.contexts, lane, attempt, &transport)
    }

    fn hello(
        &self,
        number: u64,
        attempt: u32,
        transport: Transport,
        header: &Header,
        body: &[u8],
    ) -> io::Result<()> {
        let mut r = Reader::new(body);
        let sealed = r.bytes().map_err(io::Error::other)?;
        let read = match &self.start.ticket_key {
            Some(key) => Ticket::open(sealed, key, &self.start.worker),
            None => Ticket::read(sealed, &self.start.worker),
        };
        let ticket = match read {
            Ok(ticket) if ticket.lease == self.start.lease => ticket,
            Ok(_) => return Err(refuse(&transport, "ticket is for another lease".into())),
            Err(e) => return Err(refuse(&transport, e.to_string())),
        };
        let mut windows = Vec::new();
        let (count, size) = (r.word().map_err(io::Error::other)?, r.word().map_err(io::Error::other)?);
        for _ in 0..count.min(MAX_WINDOWS) {
            windows.push(r.word().map_err(io::Error::other)?);
        }
        let abilities = r.word().unwrap_or_default();
        // A worker serves one process: it refuses any other connection with a ticket, however good.
        let contexts = {
            let mut contexts = self.contexts.lock().map_err(|_| io::Error::other("worker failed before"))?;
            if self.session.get().is_some() {
                return Err(refuse(
                    &transport,
                    "this worker already serves a process: ticket used twice".into(),
                ));
            }
            if self.start.ticket_key.is_none() {
                let opened = self.seal.ask(&self.supervisor, FromWorker::Sealed { ticket: sealed.into() });
                opened.map_err(|reason| refuse(&transport, reason))?;
            }
            match contexts.take() {
                Some(contexts) => contexts,
                None => warm(self.driver, &self.start, &self.supervisor, self.lacking.clone())
                    .map_err(|e| refuse(&transport, e))?,
            }
        };
        let secret = secret()?;
        let encrypted = transport.encrypted();
        let grace = Duration::from_secs(self.start.resume_grace_s.into());
        let (end, line) = WorkerEnd::new(self.start.worker, &secret, grace, transport, attempt);
        let session = Arc::new(Session::new(
            self.driver,
            self.start.clone(),
            end,
            contexts,
            self.output.clone(),
            self.quota.clone(),
            secret,
        ));
        if abilities & library_ability::HOLDS != 0 {
            session.lanes.program_holds(session.replies.clone());
        }
        session.replies.long.store(abilities & library_ability::LONG_REPLIES != 0, Ordering::Relaxed);
        if abilities & library_ability::IMAGES_AGAIN != 0 {
            session.images.forget_idle();
        }
        if self.session.set(session.clone()).is_err() {
            return Err(io::Error::other("ticket used twice"));
        }
        let process = ClientProcess {
            uid: ticket.uid,
            user: ticket.user,
            pid: ticket.pid,
            program: ticket.program,
            executable: ticket.executable,
            encrypted,
        };
        if let Err(reason) = self.admission.ask(&self.supervisor, FromWorker::Presented(process)) {
            self.supervisor.report(&FromWorker::Refused { number, reason: reason.clone() });
            session
                .replies
                .send_with(op::REPLY, header.seq.get(), DEVICE_UNAVAILABLE, |w| w.bytes(reason.as_bytes()));
            session.end(&format!("the program was refused: {reason}"));
        }
        self.supervisor.report(&FromWorker::Admitted { number, lane: 0 });
        let window = session.memory.reserve(self.driver, &windows, size).unwrap_or(0);
        let mut described = Ok(());
        session.replies.send_with(op::REPLY, header.seq.get(), 0, |w| {
            w.bytes(&session.lane_secret);
            w.word(self.start.resume_grace_s.into());
            w.word(window);
            described = session.contexts.describe(self.driver, session.shares.possible().is_ok(), w);
            w.word(ability::ALL);
        });
        if let Err(error) = described {
            session.end(&format!("cannot describe the GPUs: CUDA error {error}"));
        }
        if let Err(e) = Activity::report(&session) {
            session.end(&format!("cannot start the thread for reports: {e}"));
        }
        match session.replay.run(&session, line) {
            Ok(()) => session.end("the client's process exited"),
            Err(e) => session.end(&format!("connection to the client: {e}")),
        }
    }
}

/// Opens the stream of a connection that the supervisor has handed over.
///
/// The socket, which is returned too, times out until its owner lifts that after the greeting.
pub fn accept(
    start: &Start,
    tls: &Arc<ServerConfig>,
    preface: &[u8],
    socket: OwnedFd,
) -> io::Result<(Preface, Transport, TcpStream)> {
    let preface: &[u8; LEN] = preface.try_into().map_err(|_| io::Error::other("short preface"))?;
    let preface = Preface::parse(preface).map_err(io::Error::other)?;
    if preface.worker != start.worker {
        return Err(io::Error::other("preface for another worker"));
    }
    let socket = TcpStream::from(socket);
    socket.set_nonblocking(false)?;
    socket.set_read_timeout(Some(GREETING_TIMEOUT))?;
    let control = socket.try_clone()?;
    if let Err(e) = preface.check_version() {
        return Err(refuse_unread(socket, Code::Version, e.to_string()));
    }
    if !preface.tls() && start.require_tls {
        let reason = "this server demands encryption, but the grant was made without it; start the program again, \
                      which asks for a new grant";
        return Err(refuse_unread(socket, Code::Clear, reason.into()));
    }
    let transport = match preface.tls() {
        true => Transport::tls_server(socket, tls.clone())?,
        false => Transport::plain(socket)?,
    };
    Ok((preface, transport, control))
}

/// Returns a random secret of a session.
pub fn secret() -> io::Result<[u8; 32]> {
    let mut secret = [0; 32];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut secret)
        .map_err(|_| io::Error::other("cannot read random bytes"))?;
    Ok(secret)
}

/// Returns `true` if a lane's greeting shows that its sender knows the session's secret.
pub fn proves(greeting: &[u8], secret: &[u8; 32], lane: u16) -> bool {
    let proof = blake3::keyed_hash(secret, &lane.to_le_bytes());
    let shown = Reader::new(greeting).bytes().ok().and_then(|b| <[u8; 32]>::try_from(b).ok());
    shown.map(blake3::Hash::from_bytes) == Some(proof)
}

/// Sends the reason for a refusal before the first frame; the client shows it to its user.
pub fn refuse(transport: &Transport, reason: String) -> io::Error {
    refuse_as(transport, Code::Other, reason)
}

fn refuse_as(transport: &Transport, code: Code, reason: String) -> io::Error {
    let _ = transport.send(&preface::refusal(code, &reason));
    io::Error::other(reason)
}

/// Refuses a connection in clear, as its first bytes.
fn refuse_unread(socket: TcpStream, code: Code, reason: String) -> io::Error {
    let sent = socket.try_clone().and_then(|control| {
        let transport = Transport::plain(socket)?;
        let refused = refuse_as(&transport, code, reason.clone());
        // Unread input would make the kernel discard the refusal on closing: read it first.
        control.shutdown(std::net::Shutdown::Write)?;
        let _ = greeting(&transport);
        Ok(refused)
    });
    sent.unwrap_or_else(|_| io::Error::other(reason))
}

/// Receives the first frame.
pub fn greeting(transport: &Transport) -> io::Result<(Header, Vec<u8>)> {
    let wait = Wait::AtMost(Duration::ZERO, GREETING_TIMEOUT);
    let mut head = [0; HEADER];
    transport.recv_exact(&mut head, wait)?;
    let header = Header::parse(&head).map_err(io::Error::other)?;
    if header.body_len() > MAX_GREETING {
        return Err(io::Error::other("greeting too long"));
    }
    let mut body = vec![0; header.body_len()];
    transport.recv_exact(&mut body, wait)?;
    Ok((header, body))
}
