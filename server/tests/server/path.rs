//! An attacker between a client's daemon and the control port.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use gpusession_proto::control::{AllocateRequest, Lease, ServerDescription};
use gpusession_proto::join;
use gpusession_test_server::{LONG, Server, rest};
use gpusession_test_support::path::{Fault, Faults, Path, drawn};
use gpusessiond::client::Remote;
use gpusessiond::identity::Identity;
use gpusessiond::pool::PoolServer as _;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use crate::identities::{identity_of, unix};

fn identity(server: &Server) -> (tempfile::TempDir, Identity) {
    let folder = tempfile::tempdir().unwrap();
    let identity = identity_of(server, folder.path(), "vm-1", unix()).load().unwrap();
    (folder, identity)
}

/// Puts an attacker in front of the control port, and returns a daemon's client of it.
fn attacked(
    server: &Server,
    identity: &Identity,
    faults: impl Fn(u32) -> Faults + Send + 'static,
) -> (Remote, Path) {
    let path = Path::start(server.control.parse().unwrap(), faults);
    (Remote::new(&path.address.to_string(), identity).unwrap(), path)
}

/// Leaves out what changes from call to call.
fn lasting(mut description: ServerDescription) -> ServerDescription {
    for device in &mut description.devices {
        (device.state, device.memory_free_bytes) = (String::new(), 0);
    }
    ServerDescription { time_usec: 0, leases: None, programs: None, ..description }
}

/// As [`lasting`], for a lease.
fn same(lease: Lease) -> Lease {
    Lease { ttl_usec: 0, workers: Vec::new(), ..lease }
}

// A flood of calls on one thread, the relay's threads beside it.
#[tokio::test(flavor = "multi_thread")]
async fn changed_bits_and_cuts_never_become_answers() {
    const FAULTS: u32 = 60;
    // About as many bytes as a connection and some calls have.
    const WITHIN: u64 = 12_000;
    // A fast machine makes more calls in a second than a client has by default.
    let server = Server::start_with("libcuda.so.1", "limits.requests_per_s = 100000").await;
    let (_folder, identity) = identity(&server);
    let (remote, path) = attacked(&server, &identity, |connection| drawn(5, connection, WITHIN));
    let clean = Remote::new(&server.control, &identity).unwrap();
    let described = lasting(clean.describe(None).await.unwrap());
    let (mut good, mut errors) = (0, 0);
    let begun = Instant::now();
    for round in 0.. {
        if path.happened() >= FAULTS && good >= 100 {
            break;
        }
        assert!(begun.elapsed() < 8 * LONG, "{good} answers, {errors} errors, {} faults", path.happened());
        let request = AllocateRequest {
            gpus: 1,
            boot_id: "b1".into(),
            memory_percent: 1.0,
            request_id: format!("request-{round}"),
            ..Default::default()
        };
        let through = remote.allocate(request.clone()).await;
        // The same request gets the same lease.
        let lease = clean.allocate(request).await.unwrap();
        match through {
            Ok(through) => {
                assert_eq!(same(through), same(lease.clone()));
                good += 1;
            }
            Err(_) => errors += 1,
        }
        match remote.describe(None).await {
            Ok(through) => {
                assert_eq!(lasting(through), described);
                good += 1;
            }
            Err(_) => errors += 1,
        }
        match remote.renew(vec![lease.id.clone(), "nonsense".into()], "b1".into()).await {
            Ok(through) => {
                let lost: Vec<_> = through.leases.iter().map(|row| (row.id.as_str(), row.lost)).collect();
                assert_eq!(lost, [(lease.id.as_str(), false), ("nonsense", true)]);
                good += 1;
            }
            Err(_) => errors += 1,
        }
        let _ = remote.release(lease.id.clone()).await;
        clean.release(lease.id).await.unwrap();
    }
    println!(
        "{} faults on {} connections, {good} answers, {errors} errors, {:?}",
        path.happened(),
        path.connections(),
        begun.elapsed()
    );
    assert!(errors > 0, "the faults hit calls");
    assert!(path.connections() >= path.happened(), "a connection ends with its fault");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_older_tls_and_no_clear_text_on_the_control_port() {
    let server = Server::start().await;
    let (_folder, identity) = identity(&server);
    for faults in [[Some(Fault::Older), None], [None, Some(Fault::Older)]] {
        let (remote, path) = attacked(&server, &identity, move |_| faults);
        remote.describe(None).await.unwrap_err();
        assert!(path.happened() > 0, "{faults:?}");
    }
    // A client that speaks TLS 1.2 alone.
    let answer = {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(server.authority().as_bytes()).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS12])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(join::any_server()).unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut socket = TcpStream::connect(&server.control).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        client.write_tls(&mut socket).unwrap();
        rest(&mut socket)
    };
    // An alert of level 2: protocol_version.
    assert_eq!((answer.first(), answer.get(5..7)), (Some(&21), Some(&[2, 70][..])), "{answer:?}");
    // A peer that answers as HTTP/2 in clear.
    let remote = Remote::new(&in_clear().to_string(), &identity).unwrap();
    remote.describe(None).await.unwrap_err();
}

/// Serves empty settings of HTTP/2 to each connection.
fn in_clear() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut socket in listener.incoming().flatten() {
            let _ = socket.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]);
            let _ = socket.read(&mut [0; 4096]);
        }
    });
    address
}
