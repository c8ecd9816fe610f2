use gpusession_proto::statement::Statement;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SigningKey as _};

use super::*;

const NOW: u64 = 1_900_000_000;
const DAY: u64 = 24 * 3600;

/// An authority with its key.
struct Pool {
    issuer: Issuer<'static, KeyPair>,
    der: CertificateDer<'static>,
    pem: String,
}

fn time(unix: u64) -> std::time::SystemTime {
    std::time::UNIX_EPOCH + Duration::from_secs(unix)
}

impl Pool {
    fn new(name: &str, begins_unix: u64) -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_before = time(begins_unix).into();
        params.not_after = time(begins_unix + 300 * DAY).into();
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let (der, pem) = (certificate.der().clone(), certificate.pem());
        Self { issuer: Issuer::new(params, key), der, pem }
    }

    fn signs(&self, name: String) -> String {
        let mut params = CertificateParams::new(vec![name]).unwrap();
        params.not_before = time(NOW - DAY).into();
        params.not_after = time(NOW + DAY).into();
        params.signed_by(&KeyPair::generate().unwrap(), &self.issuer).unwrap().pem()
    }

    fn confirms(&self, other: &Self) -> String {
        self.signs(join::authority(&sha256(&other.der)))
    }

    fn authority(&self) -> Authority {
        Authority::new(self.der.clone()).unwrap()
    }

    fn trusted(&self) -> Authorities {
        Authorities::new(vec![self.der.clone()]).unwrap()
    }
}

fn fingerprints(authorities: &Authorities) -> Vec<Fingerprint> {
    authorities.fingerprints().collect()
}

#[test]
fn a_new_authority_needs_the_confirmation_of_a_trusted_one() {
    let (old, new, foreign) =
        (Pool::new("old", NOW - DAY), Pool::new("new", NOW - 60), Pool::new("foreign", NOW - 60));
    let held = old.trusted();
    let list = [&*old.pem, &new.pem, &old.confirms(&new), &new.confirms(&old)].concat();
    let offered = held.offered(&list, NOW).unwrap();
    assert_eq!(offered, [old.authority(), new.authority()], "in the server's order");
    assert_eq!(held.offered(&old.pem, NOW).unwrap(), [old.authority()]);

    let confirmed = |by: &Pool, other: &Pool| [&*old.pem, &other.pem, &by.confirms(other)].concat();
    let expired = Pool::new("expired", NOW - 301 * DAY);
    for (what, list) in [
        ("without a confirmation", [&*old.pem, &new.pem].concat()),
        ("confirmed by itself", confirmed(&new, &new)),
        ("confirmed by a stranger", confirmed(&foreign, &new)),
        ("the confirmation of another one", [&*old.pem, &foreign.pem, &old.confirms(&new)].concat()),
        ("expired", confirmed(&old, &expired)),
        ("a client's certificate", [&*old.pem, &old.signs(join::client("vm-1"))].concat()),
        ("nothing", String::new()),
        ("garbage", "garbage".into()),
        ("garbage in PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".into()),
        ("cut", old.pem[..old.pem.len() / 2].into()),
        ("only confirmations", old.confirms(&new)),
        ("too many certificates", old.pem.repeat(MAX_CERTIFICATES + 1)),
        ("too many authorities", old.pem.repeat(MAX_AUTHORITIES + 1)),
        ("too long", format!("{}{}", old.pem, "#".repeat(MAX_LIST))),
    ] {
        assert!(held.offered(&list, NOW).is_err(), "{what}");
    }
}

#[test]
fn an_authority_is_dropped_when_every_server_has_answered_without_it() {
    let (old, new) = (Pool::new("old", NOW - DAY), Pool::new("new", NOW - 60));
    let (only_old, only_new) = (Some(vec![old.authority()]), Some(vec![new.authority()]));
    let both = Some(vec![old.authority(), new.authority()]);
    let (old_name, new_name) = (old.authority().name, new.authority().name);
    let held = old.trusted();
    assert!(held.replaced_by(&[], &old_name).is_none());
    assert!(held.replaced_by(&[None, only_old.clone()], &old_name).is_none());
    // One server has begun: both count, whatever the other one says.
    let two = held.replaced_by(&[only_old.clone(), both.clone()], &old_name).unwrap();
    assert_eq!(fingerprints(&two), [old.authority().fingerprint, new.authority().fingerprint]);
    assert!(two.replaced_by(&[both.clone(), None], &old_name).is_none());
    assert!(two.replaced_by(&[only_old.clone(), None], &old_name).is_none(), "one has not answered");
    assert!(two.replaced_by(&[only_new.clone(), only_new.clone()], &old_name).is_none(), "its own");
    let aborted = two.replaced_by(&[only_old.clone(), only_old], &old_name).unwrap();
    assert_eq!(fingerprints(&aborted), fingerprints(&held));
    let finished = two.replaced_by(&[only_new.clone(), only_new], &new_name).unwrap();
    assert_eq!(fingerprints(&finished), [new.authority().fingerprint]);

    // Servers that name ever more authorities change nothing.
    let many: Vec<_> = (0..MAX_AUTHORITIES)
        .map(|n| Some(vec![Pool::new(&format!("many {n}"), NOW - 60).authority()]))
        .collect();
    assert!(held.replaced_by(&many, &old_name).is_none());
}

#[test]
fn a_certificate_moves_to_a_newer_authority_once_every_server_trusts_it() {
    let (old, new) = (Pool::new("old", NOW - DAY), Pool::new("new", NOW - 60));
    let (old_, new_) = (old.authority(), new.authority());
    let both = Authorities::of(vec![old_.clone(), new_.clone()]).unwrap();
    let begun = Some(vec![old_.clone(), new_.clone()]);
    let switched = Some(vec![new_.clone(), old_.clone()]);
    let at = |answers: &[Option<Vec<Authority>>], own: &Authority| both.renew_at(answers, &own.name);
    assert_eq!(at(&[begun.clone(), begun.clone()], &old_), <[usize; 0]>::default());
    assert_eq!(at(&[begun.clone(), switched.clone()], &old_), [1]);
    assert_eq!(at(&[switched.clone(), switched.clone()], &old_), [0, 1]);
    assert_eq!(at(&[begun, switched.clone()], &new_), <[usize; 0]>::default(), "never back");
    assert_eq!(at(&[switched.clone(), None], &old_), <[usize; 0]>::default());
    let unready = Some(vec![old_.clone()]);
    assert_eq!(at(&[switched.clone(), unready], &old_), <[usize; 0]>::default());
    assert_eq!(old.trusted().renew_at(&[switched], &old_.name), <[usize; 0]>::default(), "not trusted yet");
}

#[test]
fn the_file_of_authorities_reads_back() {
    let (old, new) = (Pool::new("old", NOW - DAY), Pool::new("new", NOW - 60));
    let both = Authorities::of(vec![old.authority(), new.authority()]).unwrap();
    assert_eq!(
        both.to_pem().lines().collect::<String>(),
        [&*old.pem, &new.pem].concat().lines().collect::<String>()
    );
    let read = CertificateDer::pem_slice_iter(both.to_pem().as_bytes()).collect::<Result<Vec<_>, _>>();
    assert_eq!(fingerprints(&Authorities::new(read.unwrap()).unwrap()), fingerprints(&both));
}

#[test]
fn a_statement_of_a_trusted_authority_alone_refuses_a_server() {
    let (pool, foreign) = (Pool::new("pool", NOW - DAY), Pool::new("foreign", NOW - DAY));
    let stated = |by: &Pool, named: &Pool, verdict: Verdict| {
        let statement = Statement { server: "gpu1".into(), number: 1, unix: NOW, turn: 0, verdict };
        let body = statement.body();
        let signature = by.issuer.key().sign(&signed_message(&body)).unwrap();
        Signed { body, authority: sha256(&named.der), signature }.bytes()
    };
    let server = |name: &str| Verdict::RevokeServer { name: name.into() };
    let mut altered = stated(&pool, &pool, server("gpu4"));
    let at = altered.windows(4).position(|bytes| bytes == b"gpu4").unwrap();
    altered[at + 3] = b'5';
    let statements = [
        b"garbage".to_vec(),
        altered,
        stated(&foreign, &foreign, server("gpu6")),
        stated(&foreign, &pool, server("gpu7")),
        stated(&pool, &pool, Verdict::RevokeAdministrator { name: "gpu8".into() }),
        stated(&pool, &pool, server("gpu2")),
    ];
    let revoked = pool.trusted().revoked(&statements);
    assert_eq!(revoked, Revoked::from(["gpu2".to_owned()]));
    let flood = vec![statements[0].clone(); MAX_REVOKED];
    assert!(pool.trusted().revoked(&[flood, statements.to_vec()].concat()).is_empty());

    let verifier = pool.trusted().verifier(Arc::new(revoked)).unwrap();
    let shows = |server: &str| {
        let mut params = CertificateParams::new(vec![join::any_server(), join::server(server)]).unwrap();
        params.not_before = time(NOW - DAY).into();
        params.not_after = time(NOW + DAY).into();
        let certificate = params.signed_by(&KeyPair::generate().unwrap(), &pool.issuer).unwrap();
        let name = ServerName::try_from(join::any_server()).unwrap();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(NOW));
        verifier.verify_server_cert(certificate.der(), &[], &name, &[], now).map_err(|e| e.to_string())
    };
    assert!(shows("gpu1").is_ok());
    assert!(shows("gpu2").unwrap_err().contains("server gpu2 is revoked"));
}
