//! Garbage on the control port and on the administration socket.
//!
//! The server closes or clearly answers each connection, and others do not notice.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use gpusession_proto::join;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tonic::transport::Identity;
use tonic::{Code, Request};

use crate::renew;
use gpusession_test_server::{Client, LONG, Server, rest};

/// A client's end of a TLS connection to the control port.
fn tls(server: &Server, identity: Option<&(String, String)>) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(server.authority().as_bytes()).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).map(Result::unwrap).collect();
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = ServerName::try_from(join::any_server()).unwrap();
    let socket = TcpStream::connect(&server.control).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), socket)
}

fn noise(len: usize) -> Vec<u8> {
    let mut state = 1u32;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..len).map(next).collect()
}

/// Sends bytes to the control port, and reads until the server closes.
fn answer_in_clear(server: &Server, bytes: &[u8]) -> Vec<u8> {
    let mut socket = TcpStream::connect(&server.control).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    // The server may close the connection before it has read all bytes.
    let _ = socket.write_all(bytes);
    let _ = socket.shutdown(std::net::Shutdown::Write);
    rest(&mut socket)
}

/// Sends bytes other than HTTP/2 over TLS; returns the number of bytes in the answer.
fn answer_in_tls(server: &Server, identity: Option<&(String, String)>, bytes: &[u8]) -> usize {
    let mut stream = tls(server, identity);
    let _ = stream.write_all(bytes);
    stream.conn.send_close_notify();
    let _ = stream.flush();
    let mut heard = Vec::new();
    match stream.read_to_end(&mut heard) {
        Ok(_) => {}
        Err(e) => assert!(
            !matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut),
            "the connection stays open: {e}"
        ),
    }
    heard.len()
}

async fn still_serves(client: &mut Client, lease: &str) {
    let renewed = client.pool.renew(renew(&[lease])).await.unwrap().into_inner();
    assert!(!renewed.leases[0].lost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_on_the_control_port_disturbs_no_client() {
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const TLS_ALERT: u8 = 21;
    let server = Server::start().await;
    let mut client = server.client("vm-1").await;
    let lease = client.allocate(10.0).await.unwrap().id;
    let identity = server.enrol(&server.token(&[]), "vm-2", "machine of vm-2").await.unwrap();

    // The server gives up a silent connection after a while; others do not wait for that.
    let hello = {
        let mut first = Vec::new();
        tls(&server, None).conn.write_tls(&mut first).unwrap();
        first
    };
    let begun = Instant::now();
    let silent: Vec<_> = [&[][..], &hello[..1], &hello[..hello.len() / 2]]
        .iter()
        .map(|bytes| {
            let mut socket = TcpStream::connect(&server.control).unwrap();
            socket.set_read_timeout(Some(LONG)).unwrap();
            socket.write_all(bytes).unwrap();
            socket
        })
        .collect();

    let mut long = hello.clone();
    long[3..5].copy_from_slice(&u16::MAX.to_be_bytes());
    let mut changed = hello.clone();
    changed[5..].reverse();
    for bytes in [
        &b""[..],
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
        PREFACE,
        &noise(100_000),
        &hello[..3],
        &hello[..hello.len() - 1],
        &long,
        &changed,
    ] {
        let heard = answer_in_clear(&server, bytes);
        assert!(heard.is_empty() || heard[0] == TLS_ALERT, "{bytes:?}: {heard:?}");
        still_serves(&mut client, &lease).await;
    }

    // The header of a frame of 16 MiB, a frame of an unknown type, and a truncated frame.
    let announced = [PREFACE, &[0xff, 0xff, 0xff, 4, 0, 0, 0, 0, 0]].concat();
    let strange = [PREFACE, &[0, 0, 8, 0xee, 0xff, 0xff, 0xff, 0xff, 0xff], &[0; 8]].concat();
    let cut = [PREFACE, &[0, 1, 0, 1, 4, 0, 0, 0, 1, 0x82]].concat();
    for identity in [None, Some(&identity)] {
        for bytes in
            [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &noise(100_000), &PREFACE[..10], &announced, &strange, &cut]
        {
            // The answer is at most the settings, and a GOAWAY with a reason.
            let heard = answer_in_tls(&server, identity, bytes);
            assert!(heard < 1000, "{heard}");
            still_serves(&mut client, &lease).await;
        }
    }

    for mut socket in silent {
        assert!(rest(&mut socket).is_empty());
    }
    assert!(begun.elapsed() < LONG);
    still_serves(&mut client, &lease).await;
}

#[tokio::test]
async fn messages_that_are_none_are_answered() {
    let server = Server::start().await;
    let mut client = server.client("vm-1").await;
    let lease = client.allocate(10.0).await.unwrap().id;
    let identity = server.enrol(&server.token(&[]), "vm-2", "machine of vm-2").await.unwrap();
    let known = Identity::from_pem(&identity.0, &identity.1);
    for (who, identity) in [("stranger", None), ("client", Some(known))] {
        for (method, len, codes) in [
            ("Pool/Allocate", 9, [Code::Internal, Code::InvalidArgument]),
            ("Pool/Allocate", 100_000, [Code::OutOfRange, Code::ResourceExhausted]),
            ("Enrolment/Join", 100_000, [Code::OutOfRange, Code::ResourceExhausted]),
            ("Pool/Nothing", 9, [Code::Unimplemented; 2]),
            ("Nothing/Allocate", 9, [Code::Unimplemented; 2]),
        ] {
            let channel = server.connect(identity.clone()).await.unwrap();
            let mut grpc = tonic::client::Grpc::new(channel);
            grpc.ready().await.unwrap();
            // These messages have a number or a text in place of these bytes.
            let message = Request::new(vec![0xffu8; len]);
            let path = format!("/gpusession.v1.{method}").parse().unwrap();
            let answer =
                grpc.unary(message, path, tonic_prost::ProstCodec::<Vec<u8>, Vec<u8>>::default()).await;
            let status = answer.expect_err(method);
            assert!(codes.contains(&status.code()), "{who}: {method}, {len}: {status:?}");
            still_serves(&mut client, &lease).await;
        }
    }
}

#[tokio::test]
async fn garbage_on_the_administration_socket_disturbs_no_caller() {
    let server = Server::start().await;
    let socket = || {
        let socket = UnixStream::connect(server.path("run/admin.sock")).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        socket
    };
    let framed = |body: &[u8]| [&(body.len() as u32).to_le_bytes(), body].concat();
    let _silent = (socket(), socket());
    let bad = Some("\"bad-request\"");
    let deep = vec![b'['; 60_000];
    let cases: [(&str, Vec<u8>, Option<&str>); 12] = [
        ("nothing", Vec::new(), None),
        ("a part of a length", vec![1, 0, 0], None),
        ("a request that is cut off", framed(b"\"Status\"")[..7].to_vec(), None),
        ("the longest length", vec![0xff; 4], bad),
        ("a length that is too long", [&(65_537u32).to_le_bytes()[..], &[b'x'; 1000]].concat(), bad),
        ("an empty request", framed(b""), bad),
        ("noise", framed(&noise(5000)), bad),
        ("text", framed(b"status"), bad),
        ("a verb that is none", framed(b"\"Frobnicate\""), bad),
        ("a verb with the wrong words", framed(b"{\"Stop\": {\"force\": 7}}"), bad),
        ("arrays in arrays", framed(&deep), bad),
        ("HTTP", b"GET / HTTP/1.1\r\n\r\n".to_vec(), bad),
    ];
    for (what, bytes, wanted) in cases {
        let mut socket = socket();
        let _ = socket.write_all(&bytes);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let mut heard = Vec::new();
        match socket.read_to_end(&mut heard) {
            Ok(_) => {}
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{what}"),
        }
        let heard = String::from_utf8_lossy(&heard);
        assert!(wanted.map_or(heard.is_empty(), |wanted| heard.contains(wanted)), "{what}: {heard}");
        assert_eq!(server.json(&["status"])["server"]["name"], "s1", "{what}");
    }
}
