//! Servers without the authority's key, as an issuer knows them from their calls.
//!
//! A rotation waits for them and for their clients, which may call no issuer.

use std::collections::BTreeMap;

use data_encoding::HEXLOWER;
use gpusession_proto::control::{AwaitedClient, ServerReport};
use gpusession_proto::join::is_name;
use serde::{Deserialize, Serialize};

use super::clients::SEEN_STEP;
use crate::signer::authorities::Phase;

/// Time since its latest call for which a rotation waits for a client or a server, in seconds.
pub const LIVE_WINDOW: u64 = 30 * 24 * 3600;
/// Most servers whose calls an issuer notes.
const MAX_SERVERS: usize = 1024;
/// Most clients that a server names in a report.
pub const MAX_CLIENTS: usize = 256;

/// The servers that have called this issuer, by name.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Members {
    servers: BTreeMap<String, Noted>,
}

/// Notes of an issuer about a server.
#[derive(Debug, Serialize, Deserialize)]
struct Noted {
    /// Latest call, a day less exact, in seconds since 1970.
    seen_unix: u64,
    /// Its report in this run of the issuer; `None`: it has not reported yet.
    #[serde(skip)]
    report: Option<ServerReport>,
}

/// A server in the status of a rotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Name of the server.
    pub name: String,
    /// Latest call, a day less exact, in seconds since 1970.
    pub seen_unix: u64,
    /// Whether it is ready for the next step, by its own word.
    pub ready: bool,
    /// Whether the rotation waits for it: it has called in the last 30 days.
    pub live: bool,
    /// Clients for which it waits.
    pub clients: Vec<AwaitedClient>,
    /// Number of further clients for which it waits.
    pub more: u32,
}

impl Members {
    /// Notes a call with its report; returns `true` if the file needs a write.
    pub fn heard(&mut self, name: &str, report: Option<ServerReport>, unix: u64) -> bool {
        // The certificates of the others have ended.
        let before = self.servers.len();
        self.servers.retain(|_, noted| unix < noted.seen_unix + LIVE_WINDOW);
        let known = self.servers.contains_key(name);
        if !known && self.servers.len() >= MAX_SERVERS {
            return self.servers.len() != before;
        }
        let noted = self.servers.entry(name.into()).or_insert(Noted { seen_unix: unix, report: None });
        let again = unix >= noted.seen_unix + SEEN_STEP;
        if again {
            noted.seen_unix = unix;
        }
        noted.report = report.map(bounded);
        !known || again || self.servers.len() != before
    }

    /// Returns what the step after this phase of a rotation to `new` waits for.
    pub fn standing(&self, phase: Phase, new: &[u8; 32], unix: u64) -> Vec<Standing> {
        let standing = |(name, noted): (&String, &Noted)| {
            let report = noted.report.as_ref().filter(|report| report.new_authority == new);
            // A report of an earlier phase says nothing about the clients of this one.
            let report = report.filter(|report| report.switched == (phase != Phase::Begun));
            let clients = report.map(|report| report.clients.clone()).unwrap_or_default();
            Standing {
                name: name.clone(),
                seen_unix: noted.seen_unix,
                ready: report.is_some_and(|report| report.certified),
                live: unix < noted.seen_unix + LIVE_WINDOW,
                clients,
                more: report.map_or(0, |report| report.more),
            }
        };
        self.servers.iter().map(standing).collect()
    }
}

/// Leaves out of a report what no server writes.
fn bounded(mut report: ServerReport) -> ServerReport {
    report.clients.retain(|client| is_name(&client.name));
    report.clients.truncate(MAX_CLIENTS);
    report
}

/// Makes the report of a server that waits for these clients.
pub fn report(
    rotation: Option<(Phase, [u8; 32])>,
    held: &[String],
    mut clients: Vec<AwaitedClient>,
) -> ServerReport {
    let Some((phase, new)) = rotation else { return ServerReport::default() };
    let more = clients.len().saturating_sub(MAX_CLIENTS);
    clients.truncate(MAX_CLIENTS);
    ServerReport {
        new_authority: new.into(),
        switched: phase != Phase::Begun,
        certified: held.contains(&HEXLOWER.encode(&new)),
        clients,
        more: u32::try_from(more).unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: [u8; 32] = [7; 32];
    const NOW: u64 = 100 * LIVE_WINDOW;

    fn client(name: &str) -> AwaitedClient {
        AwaitedClient { name: name.into(), seen_unix: 5 }
    }

    fn facts(members: &Members, phase: Phase, unix: u64) -> Vec<(String, bool, bool, usize)> {
        let all = members.standing(phase, &NEW, unix);
        all.into_iter().map(|s| (s.name, s.ready, s.live, s.clients.len())).collect()
    }

    #[test]
    fn a_report_counts_for_its_phase_and_its_authority() {
        let held = vec![HEXLOWER.encode(&NEW)];
        let begun = report(Some((Phase::Begun, NEW)), &held, vec![client("vm-1")]);
        let switched = report(Some((Phase::Switched, NEW)), &held, Vec::new());
        let mut members = Members::default();
        assert!(members.heard("gpu2", None, NOW), "new");
        assert_eq!(facts(&members, Phase::Begun, NOW), [("gpu2".into(), false, true, 0)]);
        assert!(!members.heard("gpu2", Some(begun.clone()), NOW + 1), "written once a day");
        assert_eq!(facts(&members, Phase::Begun, NOW), [("gpu2".into(), true, true, 1)]);
        assert_eq!(facts(&members, Phase::Switched, NOW), [("gpu2".into(), false, true, 0)]);
        members.heard("gpu2", Some(switched), NOW + 1);
        assert_eq!(facts(&members, Phase::Begun, NOW), [("gpu2".into(), false, true, 0)]);
        assert_eq!(facts(&members, Phase::Switched, NOW), [("gpu2".into(), true, true, 0)]);
        let without = report(Some((Phase::Begun, NEW)), &[], Vec::new());
        let other = ServerReport { new_authority: vec![8; 32], ..begun };
        for unready in [without, other, report(None, &held, Vec::new())] {
            members.heard("gpu2", Some(unready), NOW + 1);
            assert!(!facts(&members, Phase::Begun, NOW)[0].1);
        }
        assert!(members.heard("gpu2", None, NOW + SEEN_STEP));
        // After a restart of the issuer the latest call alone is known.
        let kept = serde_json::to_string(&members).unwrap();
        let mut again: Members = serde_json::from_str(&kept).unwrap();
        assert_eq!(again.standing(Phase::Begun, &NEW, NOW)[0].seen_unix, NOW + SEEN_STEP);
        assert!(!facts(&again, Phase::Begun, NOW + SEEN_STEP + LIVE_WINDOW)[0].2);
        again.heard("gpu3", None, NOW + SEEN_STEP + LIVE_WINDOW);
        assert_eq!(facts(&again, Phase::Begun, NOW)[0].0, "gpu3", "the other's certificate has ended");
    }

    #[test]
    fn a_report_and_the_list_of_servers_are_bounded() {
        let clients: Vec<_> = (0..MAX_CLIENTS + 5).map(|n| client(&format!("vm-{n}"))).collect();
        let made = report(Some((Phase::Begun, NEW)), &[], clients.clone());
        assert_eq!((made.clients.len(), made.more), (MAX_CLIENTS, 5));
        let hostile = ServerReport { clients, ..made };
        let hostile =
            ServerReport { clients: [vec![client("\u{1b}[31m")], hostile.clients].concat(), ..hostile };
        let mut members = Members::default();
        members.heard("gpu2", Some(hostile), NOW);
        let taken = &members.standing(Phase::Begun, &NEW, NOW)[0].clients;
        assert_eq!((taken.len(), taken[0].name.as_str()), (MAX_CLIENTS, "vm-0"));
        for n in 0..2 * MAX_SERVERS {
            members.heard(&format!("s{n}"), None, NOW);
        }
        assert_eq!(members.servers.len(), MAX_SERVERS);
        assert!(!members.heard("gpu2", None, NOW), "a known one keeps its place");
    }
}
