//! A pool of two servers against a model of it: a name's identity changes by an administrator
//! alone, in whatever order machines join and call, and servers start again.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::certificate::Role;

const NAMES: usize = 2;
const MACHINES: u8 = 3;

/// A step, at one of the servers.
#[derive(Debug, Clone)]
enum Step {
    /// A machine shows a token that is good for a name.
    Join {
        name: usize,
        machine: u8,
    },
    /// A certificate that the pool has made is used; the number selects one.
    Call(usize),
    Revoke(usize),
    Forget(usize),
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let step = prop_oneof![
        4 => (0..NAMES, 0..MACHINES).prop_map(|(name, machine)| Step::Join { name, machine }),
        6 => (0usize..64).prop_map(Step::Call),
        1 => (0..NAMES).prop_map(Step::Revoke),
        1 => (0..NAMES).prop_map(Step::Forget),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec((0usize..2, step), 1..60)
}

/// State of a name that a server has to keep.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    owner: Option<[u8; 32]>,
    revoked: bool,
    /// Certificates of before are void.
    forgotten_unix: u64,
}

#[derive(Debug, Clone)]
struct Made {
    certificate: [u8; 32],
    holder: Holder,
}

fn called(name: usize) -> String {
    format!("vm-{name}")
}

proptest! {
    #[test]
    fn an_identity_changes_by_an_administrator_alone(steps in steps()) {
        let mut servers = [Clients::default(), Clients::default()];
        let mut held: [HashMap<String, Held>; 2] = Default::default();
        let mut made: Vec<Made> = Vec::new();
        for (number, (at, step)) in steps.into_iter().enumerate() {
            let unix = 1000 + number as u64 * 10;
            let clients = &mut servers[at];
            match step {
                Step::Join { name, machine } => {
                    let (name, identity) = (called(name), [machine + 1; 32]);
                    let one = held[at].entry(name.clone()).or_default();
                    let may = !one.revoked && one.owner.is_none_or(|owner| owner == identity);
                    prop_assert_eq!(clients.may_join(&name, &identity).is_ok(), may);
                    if may {
                        let certificate = [100 + number as u8; 32];
                        let holder =
                            Holder { role: Role::Client, name, issued_unix: unix, expires_unix: unix + 10_000, identity };
                        clients.join(&holder.name, Dated::new(&certificate, unix, unix + 10_000), &identity, "m");
                        one.owner = Some(identity);
                        made.push(Made { certificate, holder });
                    }
                }
                Step::Call(which) if !made.is_empty() => {
                    let Made { certificate, holder } = &made[which % made.len()];
                    let one = held[at].entry(holder.name.clone()).or_default();
                    let known = match clients.identify(certificate, unix) {
                        Err(Refusal::Unknown) => {
                            clients.introduce(certificate, holder, unix).map(|_| holder.name.clone())
                        }
                        other => other.map(|(name, _)| name),
                    };
                    if let Ok(name) = known {
                        prop_assert_eq!(&name, &holder.name);
                        prop_assert!(!one.revoked, "a revoked client is served");
                        prop_assert!(one.owner.is_none_or(|owner| owner == holder.identity), "a name was taken over");
                        prop_assert!(holder.issued_unix > one.forgotten_unix, "a forgotten certificate is good");
                        one.owner = Some(holder.identity);
                    }
                }
                Step::Call(_) => {}
                Step::Revoke(name) => {
                    clients.revoke(&called(name), unix);
                    held[at].entry(called(name)).or_default().revoked = true;
                }
                Step::Forget(name) => {
                    clients.forget(&called(name), unix);
                    held[at].insert(called(name), Held { forgotten_unix: unix, ..Held::default() });
                }
                Step::Restart => {
                    let stored = serde_json::to_vec(&clients.save()).unwrap();
                    *clients = Clients::new(serde_json::from_slice(&stored).unwrap());
                }
            }
            for (clients, held) in servers.iter().zip(&held) {
                for (name, one) in held {
                    // A revoked name that was never seen has no key.
                    prop_assert_eq!(clients.identity(name), one.owner, "{} after step {}", name, number);
                }
            }
        }
    }
}
