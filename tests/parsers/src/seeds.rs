//! Inputs that the parsers accept: the search starts from them.

use gpuserver::admin::Ask;
use gpuserver::audit::{self, Event};
use gpuserver::cgroups::Bounds;
use gpuserver::checkpoint::Place;
use gpuserver::signer::tokens::Tokens;
use gpuserver::signer::{Done, Operation, Outcome, Privileged, Refused, Step, Why};
use gpuserver::starter::{self, Group, Purpose, Said};
use gpusession_common::keys::uncommented;
use gpusession_login::{Open, Reply, Request, variables as login_variables};
use gpusession_proto::frame::{Header, Writer, op};
use gpusession_proto::join::{self, FleetKey, JoinToken};
use gpusession_proto::preface::{Code, FLAG_TLS, Key, Preface, refusal};
use gpusession_proto::statement::{Signed, Statement, Verdict};
use gpusession_proto::ticket::Ticket;
use gpusession_proto::{changes, grant, message, readings, supervise};
use rcgen::{CertificateParams, KeyPair};
use serde::Serialize;

/// Key of the seeds' prefaces and tickets.
pub const KEY: [u8; 32] = [7; 32];
const WORKER: [u8; 16] = [0; 16];

/// Returns a message without its length.
fn body<T: Serialize>(message: &T) -> Vec<u8> {
    message::encode(message)[4..].to_vec()
}

pub fn frames() -> Vec<Vec<u8>> {
    let header = Header { op: op::HELLO.into(), seq: 1.into(), ..Header::empty() };
    let mut words = Vec::new();
    let mut w = Writer::new(&mut words, &header);
    (0..6).for_each(|word| w.word(word));
    w.bytes(b"some bytes");
    w.finish();
    let (mut changed, mut listed) = (Vec::new(), Vec::new());
    changes::push(&mut changed, 4096, b"changed");
    changes::push(&mut changed, 96, &[[0; 3].as_slice(), &[1; 201]].concat());
    let mut w = Writer::new(&mut listed, &header);
    w.words(&changed);
    w.finish();
    vec![words, listed]
}

pub fn trails() -> Vec<Vec<u8>> {
    let state = tempfile::tempdir().expect("a folder");
    for client in ["vm-1", "vm-2", "vm-3"] {
        let event = Event { client: client.into(), detail: "of a test".into(), ..audit::own("join") };
        audit::note_offline(state.path(), "gpu1", event).expect("a line");
    }
    let files = std::fs::read_dir(state.path().join("audit")).expect("the trail");
    let paths = files.map(|entry| entry.expect("a file").path());
    let whole: Vec<u8> = paths
        .filter(|path| path.extension().is_some_and(|e| e == "jsonl"))
        .flat_map(|path| std::fs::read(path).expect("a day"))
        .collect();
    let text = String::from_utf8(whole.clone()).expect("JSON");
    // The first line has the highest number; one is a checkpoint without a valid signature.
    let last = text.replacen("\"seq\":1,", &format!("\"seq\":{},", u64::MAX), 1);
    let place = format!("1 {}", "0".repeat(64));
    let checkpoint = text.replacen("\"join\"", "\"checkpoint\"", 1).replacen("of a test", &place, 1);
    vec![whole, last.into(), checkpoint.into()]
}

pub fn prefaces() -> Vec<Vec<u8>> {
    let key = Key::new(&KEY, &WORKER, 1000);
    let preface = Preface::new(WORKER, &key, 2, 3, FLAG_TLS);
    vec![preface.to_bytes().to_vec(), refusal(Code::Other, "the lease has ended")]
}

pub fn grants() -> Vec<Vec<u8>> {
    let request = |want| grant::Request {
        version: grant::VERSION,
        lease: Some("k7tgatz57mqg".into()),
        session: None,
        program: "python3".into(),
        executable: "/usr/bin/python3".into(),
        environment: vec![("CUDA_MPS_CLIENT_PRIORITY".into(), "1".into())],
        want,
    };
    let outage =
        grant::Outage { lease: "k7tgatz57mqg".into(), worker: WORKER, ms: 5000, number: 2, over: false };
    let endpoint = grant::Endpoint {
        server: "gpu1".into(),
        addresses: vec!["gpu1:7602".into(), "[2001:db8::1]:7602".into()],
        worker: WORKER,
        fingerprint: Some([3; 32]),
        key: Key::new(&KEY, &WORKER, 1000),
        ticket: vec![1; 200],
        lease: "k7tgatz57mqg".into(),
        devices: 2,
    };
    let reason = || "the server is draining".to_owned();
    vec![
        body(&request(grant::Want::Workers)),
        body(&request(grant::Want::Readings(vec![query()]))),
        body(&request(grant::Want::Outage(outage))),
        body(&grant::Reply::Granted(vec![endpoint])),
        body(&grant::Reply::Readings(view())),
        body(&grant::Reply::Version(13000)),
        body(&grant::Reply::Denied { denial: grant::Denial::NotReady, reason: reason() }),
        body(&grant::Reply::Ended(reason())),
        body(&grant::Outcome::Served),
        body(&grant::Outcome::Unserved { lease: "a".into(), reason: reason(), again: true }),
    ]
}

pub fn supervision() -> Vec<Vec<u8>> {
    use supervise::{FromWorker, ToWorker, encode};
    let start = supervise::Start {
        worker: WORKER,
        lease: "k7tgatz57mqg".into(),
        ticket_key: Some(KEY),
        driver: "/usr/lib/x86_64-linux-gnu/libcuda.so.1".into(),
        devices: vec![supervise::DeviceLimit {
            uuid: WORKER,
            memory_bytes: 1 << 30,
            sm_percent: 50,
            context_bytes: 1 << 28,
        }],
        require_tls: true,
        images: true,
        warm: true,
        verify_memory: true,
        mps: false,
        resume_grace_s: 60,
        staging_bytes: 1 << 28,
        isolation: supervise::Isolation::Require,
    };
    vec![
        encode(&ToWorker::Start(start)),
        encode(&ToWorker::Adopt { number: 1, preface: vec![9; 64], peer: "10.0.0.1:5000".into() }),
        encode(&ToWorker::Admission { refused: Some("a limit".into()) }),
        encode(&ToWorker::MemoryGranted { device: 0, serial: 3, bytes: 1 << 20, left: 1 << 30 }),
        encode(&FromWorker::Ready { fingerprint: [1; 32], cuda_version: 13000, parks: false }),
        encode(&FromWorker::Failed { reason: "no device".into() }),
        encode(&FromWorker::Usage(supervise::Usage::default())),
        encode(&FromWorker::Refused { number: 4, reason: "the ticket is of another worker".into() }),
    ]
}

fn query() -> readings::Query {
    readings::Query { device: WORKER, call: "nvmlDeviceGetTemperature".into(), input: vec![0; 4] }
}

fn view() -> readings::View {
    let device = readings::Device {
        uuid: WORKER,
        server: "gpu1".into(),
        lease: "k7tgatz57mqg".into(),
        driver_version: "580.95".into(),
        nvml_version: "13.580.95".into(),
        cuda_version: 13000,
        name: "NVIDIA H100".into(),
        pci_address: "0000:01:00.0".into(),
        compute: (9, 0),
        memory_bytes: 80 << 30,
        used_bytes: 1 << 30,
        processes: vec![readings::Process { pid: 5, name: "python3".into(), used_bytes: 1 << 29 }],
        faults: vec![readings::Fault { number: 1, event: 8, data: 31 }],
    };
    readings::View {
        devices: vec![device],
        answers: vec![readings::Answer { status: 0, output: vec![40; 4] }],
    }
}

pub fn readings() -> Vec<Vec<u8>> {
    let text = readings::uuid_text(&[0x5a; 16]).into_bytes();
    vec![body(&query()), body(&view().answers[0]), body(&view()), text]
}

pub fn tickets() -> Vec<Vec<u8>> {
    let ticket = Ticket {
        lease: "k7tgatz57mqg".into(),
        worker: WORKER,
        uid: 1000,
        user: "alice".into(),
        pid: 4711,
        boot_id: [4; 16],
        issued_usec: 1_000_000,
        nonce: [8; 16],
        program: "python3".into(),
        executable: "/usr/bin/python3".into(),
    };
    vec![ticket.seal(&KEY), body(&ticket)]
}

pub fn statements() -> Vec<Vec<u8>> {
    let name = "vm-1".to_owned();
    let verdicts = [
        Verdict::RevokeClient { name: name.clone(), identity: Some([7; 32]) },
        Verdict::ForgetClient { name: name.clone(), identity: None },
        Verdict::RevokeAdministrator { name: name.clone() },
        Verdict::RevokeServer { name },
    ];
    let signed = verdicts.map(|verdict| {
        let server = "gpu1".to_owned();
        let statement = Statement { server, number: 300, unix: 1_900_000_000, turn: 2, verdict };
        Signed { body: statement.body(), authority: [3; 32], signature: vec![0x30; 71] }
    });
    signed.iter().flat_map(|signed| [signed.bytes(), signed.text().into_bytes()]).collect()
}

pub fn join_tokens() -> Vec<Vec<u8>> {
    let token = JoinToken { authority: [1; 32], id: [2; 8], secret: [3; 24] };
    let key = FleetKey { of_tokens: token.clone(), pattern: "vm-*".into() };
    vec![token.to_text().into_bytes(), key.to_text().into_bytes()]
}

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Returns an ELF image with a kernel of two parameters, and a variable.
fn elf() -> Vec<u8> {
    const KINDS: [(&[u8], u32); 5] =
        [(b"", 0), (b".shstrtab", 3), (b".symtab", 2), (b".nv.info.add", 0x7000_0000), (b".data", 1)];
    let (mut names, mut at) = (Vec::new(), Vec::new());
    for (name, _) in KINDS {
        at.push(names.len() as u32);
        names.extend_from_slice(name);
        names.push(0);
    }
    let (kernel, variable) = (names.len() as u32, names.len() as u32 + 4);
    names.extend_from_slice(b"add\0counter\0");
    // A function that is an entry, and an object of the section of data.
    let mut symbols = vec![0; 48];
    put(&mut symbols, 0, &kernel.to_le_bytes());
    put(&mut symbols, 4, &[0x12, 0x10]);
    put(&mut symbols, 24, &variable.to_le_bytes());
    put(&mut symbols, 28, &[0x11, 0]);
    put(&mut symbols, 30, &4_u16.to_le_bytes());
    put(&mut symbols, 40, &8_u64.to_le_bytes());
    // EIATTR_KPARAM_INFO of two parameters: index, ordinal and offset, size.
    let mut info = Vec::new();
    for (ordinal, offset) in [(0_u16, 0_u16), (1, 8)] {
        info.extend_from_slice(&[4, 0x17, 12, 0, 0, 0, 0, 0]);
        info.extend_from_slice(&ordinal.to_le_bytes());
        info.extend_from_slice(&offset.to_le_bytes());
        info.extend_from_slice(&(0xf000_u32 | 8 << 18).to_le_bytes());
    }
    let bodies = [Vec::new(), names, symbols, info, vec![1; 8]];
    let mut image = vec![0; 64];
    let mut headers = Vec::new();
    for (index, body) in bodies.iter().enumerate() {
        let mut header = [0; 64];
        put(&mut header, 0, &at[index].to_le_bytes());
        put(&mut header, 4, &KINDS[index].1.to_le_bytes());
        put(&mut header, 0x18, &(image.len() as u64).to_le_bytes());
        put(&mut header, 0x20, &(body.len() as u64).to_le_bytes());
        put(&mut header, 0x28, &1_u32.to_le_bytes());
        headers.extend_from_slice(&header);
        image.extend_from_slice(body);
        image.resize(image.len().next_multiple_of(8), 0);
    }
    let table = image.len() as u64;
    image.extend_from_slice(&headers);
    put(&mut image, 0, &[0x7f, b'E', b'L', b'F', 2, 1, 1]);
    put(&mut image, 0x28, &table.to_le_bytes());
    for (at, value) in [(0x36, 56_u16), (0x3a, 64), (0x3c, bodies.len() as u16), (0x3e, 1)] {
        put(&mut image, at, &value.to_le_bytes());
    }
    image
}

/// Returns a fat binary of images with their kind and flags; those with flags are packed.
fn fatbin(images: &[(u16, u64, &[u8])]) -> Vec<u8> {
    let mut list = Vec::new();
    for (kind, flags, image) in images {
        let packed = lz4_flex::block::compress(image);
        let payload = if *flags == 0 { image } else { packed.as_slice() };
        let padded = payload.len().next_multiple_of(8);
        let mut header = vec![0; 64];
        put(&mut header, 0, &kind.to_le_bytes());
        put(&mut header, 4, &64_u32.to_le_bytes());
        put(&mut header, 8, &(padded as u64).to_le_bytes());
        put(&mut header, 16, &(if *flags == 0 { 0 } else { payload.len() as u32 }).to_le_bytes());
        put(&mut header, 28, &90_u32.to_le_bytes());
        put(&mut header, 40, &flags.to_le_bytes());
        put(&mut header, 56, &(image.len() as u64).to_le_bytes());
        list.extend_from_slice(&header);
        list.extend_from_slice(payload);
        list.resize(list.len() + padded - payload.len(), 0);
    }
    let mut image = gpusession_image::FATBIN.to_le_bytes().to_vec();
    image.extend_from_slice(&[1, 0, 16, 0]);
    image.extend_from_slice(&(list.len() as u64).to_le_bytes());
    image.extend_from_slice(&list);
    image
}

const PTX: &[u8] = b".version 8.0\n.target sm_90\n.address_size 64\n.const .align 8 .b8 c[64];\n\
    .visible .entry add(\n  .param .u64 .ptr .global .align 4 a,\n  .param .align 8 .b8 b[24]\n)\n\
    .maxntid 256, 1, 1\n{\n  // a comment\n  ret;\n}\n/* more */ .entry other() { ret; }\n";

pub fn images() -> Vec<Vec<u8>> {
    const LZ4: u64 = 0x2000;
    let elf = elf();
    vec![fatbin(&[(2, 0, &elf), (1, 0, PTX)]), fatbin(&[(2, LZ4, &elf), (1, LZ4, PTX)]), elf]
}

pub fn ptx() -> Vec<Vec<u8>> {
    vec![PTX.to_vec()]
}

pub fn logins() -> Vec<Vec<u8>> {
    let open = Open {
        uid: 1000,
        service: "sshd".into(),
        user: "alice".into(),
        tty: "pts/0".into(),
        rhost: "2001:db8::5".into(),
    };
    let reply = |session| Reply { session }.encode();
    vec![
        Request::Open(open).encode(),
        Request::Close.encode(),
        reply(Some("c7")),
        reply(Some("")),
        reply(None),
    ]
}

pub fn variables() -> Vec<Vec<u8>> {
    let rows = [("NCCL_P2P_LEVEL", "SYS"), ("_SITE_1", ""), ("SITE_PATHS", "/a:/b c=d;e")];
    vec![login_variables::encode(rows).expect("variables for logins").into_bytes()]
}

pub fn certificates() -> Vec<Vec<u8>> {
    let key = KeyPair::generate().expect("a key");
    let names = [join::client("vm-7"), join::administrator("ops"), join::server("gpu1")];
    let certificate = |name: String| {
        let names = vec![name, join::identity(&[5; 32])];
        let params = CertificateParams::new(names).expect("names");
        params.self_signed(&key).expect("a certificate").der().to_vec()
    };
    names.into_iter().map(certificate).collect()
}

pub fn requests() -> Vec<Vec<u8>> {
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec![join::client("vm-7")]).expect("a name");
    let request = params.serialize_request(&key).expect("a request");
    vec![request.pem().expect("text").into_bytes()]
}

pub fn admin() -> Vec<Vec<u8>> {
    let asks = [Ask::Status, Ask::Ps, Ask::Revoke { name: "vm-7".into() }];
    let mut texts: Vec<_> = asks.iter().map(|ask| serde_json::to_vec(ask).expect("a request")).collect();
    texts.push(br#"{"error":{"code":"local","message":"only there","hint":""}}"#.to_vec());
    texts
}

pub fn signer() -> Vec<Vec<u8>> {
    let (name, csr_pem) = ("vm-1".to_owned(), "-----BEGIN CERTIFICATE REQUEST-----".to_owned());
    let exported = Some("-----BEGIN CERTIFICATE-----".to_owned());
    let operations = [
        Operation::Present,
        Operation::Check { id: [1; 8], secret: [2; 24], name: name.clone(), from: None },
        Operation::EarlierTokenCreate { pattern: name.clone(), uses: 1, ttl: 60 },
        Operation::Renew { present: vec![0x30, 0x82], csr_pem: csr_pem.clone(), authority: [3; 32] },
        Operation::Permit(Privileged::Rotate(Step::Begin(exported))),
        Operation::Privileged(Privileged::Administrator { name, csr_pem }),
        Operation::AdoptTokens(Tokens::default()),
        Operation::State { verdict: Verdict::RevokeAdministrator { name: "alice".into() }, turn: 0 },
        Operation::StateAgain { signed: statements() },
        Operation::Checkpoint(Place { seq: 9, prev: [4; 32] }),
        Operation::Verifier,
    ];
    let outcomes: [Outcome; 3] = [
        Ok(Done::Changed(true)),
        Ok(Done::Exported("-----BEGIN PRIVATE KEY-----".into())),
        Err(Refused::new(Why::Busy, "later")),
    ];
    operations.iter().map(body).chain(outcomes.iter().map(body)).collect()
}

pub fn starter() -> Vec<Vec<u8>> {
    let request = starter::Request {
        purpose: Purpose::Monitor,
        arguments: vec!["/usr/lib/libcuda.so.1".into(), "require".into()],
        environment: vec![("PATH".into(), "/usr/bin:/bin".into())],
    };
    let bounds = Bounds { memory: 3 << 30, threads: 256 };
    let measure = starter::Request {
        purpose: Purpose::Measure(Group { of: "vm-1 netperf".into(), id: [7; 16], bounds }),
        arguments: Vec::new(),
        environment: Vec::new(),
    };
    let said = [Said::Started(4711), Said::Refused("no".into()), Said::Ended(9)];
    said.iter().map(body).chain([body(&request), body(&measure)]).collect()
}

pub fn units() -> Vec<Vec<u8>> {
    let texts = ["24GiB", "1.5 G", "80%", "1h 30min", "2d", "infinity", "500ms", "0"];
    texts.map(|text| text.as_bytes().to_vec()).into()
}

/// Returns a packaged file, and the same with all of its keys.
fn packaged(file: &str) -> Vec<Vec<u8>> {
    let all = uncommented(file).unwrap_or_default();
    [file, &all].map(|text| text.as_bytes().to_vec()).into()
}

pub fn server_configs() -> Vec<Vec<u8>> {
    packaged(include_str!("../../../packaging/etc/gpuserver.toml"))
}

pub fn client_configs() -> Vec<Vec<u8>> {
    packaged(include_str!("../../../packaging/etc/gpusession.toml"))
}
