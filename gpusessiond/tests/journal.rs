//! Message id and fields of each event that the daemon logs; administrators' tools rely on them.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use gpusession_proto::control::{Loss, PoolEvent, StateChange, Warning, pool_event};
use gpusession_proto::grant::{self, Outage, Outcome, Reply, Want};
use gpusession_proto::journal::{CATALOGS, Event, catalog};
use gpusession_proto::login::{Open, Request};
use gpusession_proto::message;
use gpusession_test_daemon::{GrantSocket, TEST_TIMEOUT, ask_async, config, engine, request, until, want};
use gpusessiond::access::Gate;
use gpusessiond::environment::Audience;
use gpusessiond::grant::Limits;
use gpusessiond::leases::sim::SimServer;
use gpusessiond::leases::{Leases, Spec};
use gpusessiond::login::{self, Sessions};
use gpusessiond::pool::{PoolError, Trouble};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use tokio::sync::watch;
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

/// A journal entry: values by field name.
type Entry = BTreeMap<String, String>;

/// Entries that were logged with a message id.
#[derive(Clone)]
struct Journal(Arc<watch::Sender<Vec<Entry>>>);

impl<S: tracing::Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &tracing::Event<'_>, _context: Context<'_, S>) {
        let mut entry = Fields(Entry::new());
        event.record(&mut entry);
        if entry.0.contains_key("MESSAGE_ID") {
            self.0.send_modify(|entries| entries.push(entry.0));
        }
    }
}

struct Fields(Entry);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_uppercase(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_uppercase(), format!("{value:?}"));
    }
}

impl Journal {
    /// Waits for an event with exactly these `GPUSESSION_` fields; values are compared by prefix.
    async fn has(&self, event: Event, fields: &[(&str, &str)]) {
        let is = |entry: &Entry| {
            let ours: BTreeMap<_, _> = entry
                .iter()
                .filter_map(|(name, value)| Some((name.strip_prefix("GPUSESSION_")?, value)))
                .collect();
            entry["MESSAGE_ID"] == event.id()
                && ours.len() == fields.len()
                && fields.iter().all(|(name, begin)| ours.get(name).is_some_and(|v| v.starts_with(begin)))
        };
        let mut entries = self.0.subscribe();
        let waited = tokio::time::timeout(TEST_TIMEOUT, entries.wait_for(|e| e.iter().any(is))).await;
        assert!(waited.is_ok(), "{event:?} {fields:?} is not among {:#?}", self.0.borrow());
    }

    /// Checks that the test has covered the events of the client's catalog.
    fn has_all(&self) {
        // Events of certificates need a server that renews: tests of the server run through them.
        let of_certificates = [
            Event::IdentityRenewed,
            Event::IdentityExpiring,
            Event::IdentityExpired,
            Event::AuthorityRotation,
        ];
        let logged: std::collections::BTreeSet<String> =
            self.0.borrow().iter().map(|entry| entry["MESSAGE_ID"].clone()).collect();
        for event in Event::ALL {
            let explained = catalog(CATALOGS[0]).contains(&event.id());
            if of_certificates.contains(event) {
                assert!(explained, "{event:?}");
                continue;
            }
            assert_eq!(logged.contains(&event.id()), explained, "{event:?}");
        }
    }
}

/// Sends a malformed request, as a library of another version might.
fn say_something_else(path: &std::path::Path) {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.write_all(&[3, 0, 0, 0, 255, 255, 255]).unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
}

/// Reports a login of this process, or its end.
fn tell(path: &std::path::Path, request: &Request) {
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    connect(std::os::fd::AsRawFd::as_raw_fd(&fd), &UnixAddr::new(path).unwrap()).unwrap();
    let mut stream = UnixStream::from(fd);
    stream.write_all(&request.encode()).unwrap();
    // Returns once the daemon has answered or closed the connection.
    let _ = stream.read(&mut [0; 1024]).unwrap();
}

#[tokio::test]
async fn each_event_says_whom_it_concerns_and_why() {
    let journal = Journal(Arc::new(watch::channel(Vec::new()).0));
    let _default = tracing_subscriber::registry().with(journal.clone()).set_default();
    let me = nix::unistd::getuid().as_raw().to_string();
    let sim = SimServer::new("gpu-a", 2);
    sim.with(|s| s.ids = ["first", "second"].map(String::from).into());
    let engine = engine(&[&sim]);
    let mut config = config(&[1]);
    config.keys.wait_ms = 0;
    want(&engine, &config).await;

    journal.has(Event::LeaseGranted, &[("LEASE", "first"), ("SERVER", "gpu-a")]).await;
    sim.until(|s| s.watched()).await;
    let say = |event| sim.send(PoolEvent { lease: "first".into(), event: Some(event) });
    let warn = |idle| Warning { left_usec: 1_000_000, reason: "rests".into(), idle };
    say(pool_event::Event::PrepareForLoss(warn(true)));
    journal.has(Event::LeaseIdle, &[("LEASE", "first"), ("REASON", "rests")]).await;
    say(pool_event::Event::PrepareForLoss(warn(false)));
    journal.has(Event::LeaseEnds, &[("LEASE", "first"), ("REASON", "rests")]).await;
    say(pool_event::Event::State(StateChange { state: "parked".into(), ..Default::default() }));
    journal.has(Event::LeaseParked, &[("LEASE", "first")]).await;
    sim.with(|s| s.leases.clear());
    say(pool_event::Event::Lost(Loss { reason: "taken".into() }));
    journal.has(Event::LeaseLost, &[("LEASE", "first"), ("REASON", "taken")]).await;
    journal.has(Event::LeaseGranted, &[("LEASE", "second"), ("SERVER", "gpu-a")]).await;

    let wanted =
        |name: &str, gpus| Spec { name: name.into(), gpus, ..Spec::configured(&config.leases[0], 1) };
    let large = engine.want(Spec { key: "large".into(), ..wanted("large", 9) }).await;
    journal.has(Event::LeaseWaits, &[("LEASE", "large"), ("REASON", "gpu-a: all GPUs are taken")]).await;
    engine.release(large, "test").await;
    sim.with(|s| s.quota = Some(1));
    engine.want(Spec { key: "much".into(), ..wanted("much", 2) }).await;
    journal.has(Event::LimitRefuses, &[("LEASE", "much"), ("REASON", "over the limit")]).await;

    sim.with(|s| s.failing = Some(PoolError::new(Trouble::Refused, "revoked")));
    journal.has(Event::IdentityRefused, &[("SERVER", "gpu-a"), ("REASON", "revoked")]).await;
    sim.with(|s| s.failing = None);
    journal.has(Event::ServerBack, &[("SERVER", "gpu-a")]).await;
    until(&engine, |s| s.server_facts().all(|s| s.state == "online")).await;
    sim.with(|s| s.failing = Some(PoolError::new(Trouble::Unreachable, "no answer")));
    journal.has(Event::ServerLost, &[("SERVER", "gpu-a"), ("REASON", "no answer")]).await;
    sim.with(|s| s.failing = None);
    until(&engine, |s| s.server_facts().all(|s| s.state == "online")).await;

    let mut strangers = config.clone();
    strangers.access.users.clear();
    strangers.access.root = false;
    let grants = GrantSocket::start(&engine, &strangers, Limits::default());
    ask_async(&grants.path, request()).await;
    journal.has(Event::AccessDenied, &[("USER", &me), ("REASON", "[access] does not let")]).await;
    let path = grants.path.clone();
    tokio::task::spawn_blocking(move || say_something_else(&path)).await.unwrap();
    journal.has(Event::ProtocolMismatch, &[("USER", &me), ("REASON", "the library and the daemon")]).await;

    let open = GrantSocket::start(&engine, &config, Limits::default());
    let about = || ("second".to_owned(), "refused".to_owned());
    for (event, outcome) in [
        (
            Event::ProgramUnserved,
            (|(lease, reason)| Outcome::Unserved { lease, reason, again: false }) as fn(_) -> _,
        ),
        (Event::ProgramLost, |(lease, reason)| Outcome::Lost { lease, reason }),
    ] {
        let (reply, mut connection) = ask_async(&open.path, request()).await;
        assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
        connection.write_all(&message::encode(&outcome(about()))).unwrap();
        journal.has(event, &[("LEASE", "second"), ("USER", &me), ("REASON", "refused")]).await;
    }

    let (reply, _connection) = ask_async(&open.path, request()).await;
    let Reply::Granted(endpoints) = reply else { panic!("{reply:?}") };
    let worker = endpoints[0].worker;
    let outage = Outage { lease: "second".into(), worker, ms: 1234, number: 1, over: true };
    ask_async(&open.path, grant::Request { want: Want::Outage(outage), ..request() }).await;
    let back = [("LEASE", "second"), ("USER", me.as_str()), ("REASON", "1234 ms without a connection")];
    journal.has(Event::ProgramBack, &back).await;

    let folder = tempfile::tempdir().unwrap();
    let leases: Arc<dyn Leases> = Arc::new(engine.clone());
    let sessions = Sessions::restore(leases, &folder.path().join("sessions"));
    let (listener, _file) = login::bind_at(&folder.path().join("pam.sock")).unwrap();
    let gate = Arc::new(Gate::new(config.access.clone()));
    let server =
        login::Server::new(sessions.clone(), gate, Arc::new(Audience::of(&config)), me.parse().unwrap());
    let _serving = tokio::spawn(server.serve(listener));
    let say = async |request: Request| {
        let path = folder.path().join("pam.sock");
        tokio::task::spawn_blocking(move || tell(&path, &request)).await.unwrap();
    };
    let open =
        Open { uid: me.parse().unwrap(), service: "login".into(), user: "me".into(), ..Open::default() };
    say(Request::Open(open)).await;
    let id = sessions.list()[0].id.clone();
    journal.has(Event::SessionOpened, &[("USER", &me), ("SESSION", &id)]).await;
    say(Request::Close).await;
    journal.has(Event::SessionClosed, &[("USER", &me), ("SESSION", &id)]).await;

    journal.has_all();
    until(&engine, |s| s.sessions.is_empty()).await;
}
