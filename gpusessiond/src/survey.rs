//! Survey of the servers: their descriptions now, for `gpusession smi`, `list`, `stats`, `health`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpusession_bus::describe::{Card, CardProgram, Endpoint, Survey, Surveyed, Usage};
use gpusession_common::usage::UsageSums;
use gpusession_proto::control;
use tokio::task::JoinSet;

use crate::addresses::MAX_ADDRESSES;
use crate::pool::{PoolError, Trouble};

/// Time that a server has to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Round trip of a call, and the server's description.
pub type Answer = Result<(Duration, control::ServerDescription), PoolError>;

/// Asks all servers at once; a server that does not answer in time counts as offline.
///
/// Only root sees programs of other users than `uid`.
pub async fn survey<F>(addresses: Vec<String>, uid: u32, ask: impl Fn(usize) -> F) -> Survey
where
    F: Future<Output = Answer> + Send + 'static,
{
    let mut asked = JoinSet::new();
    for (index, address) in addresses.iter().cloned().enumerate() {
        let answer = ask(index);
        asked.spawn(async move {
            let late = || {
                let message = format!("no answer within {} s", ANSWER_TIMEOUT.as_secs());
                Err(PoolError::new(Trouble::Unreachable, message))
            };
            let answer = tokio::time::timeout(ANSWER_TIMEOUT, answer).await.unwrap_or_else(|_| late());
            #[expect(clippy::disallowed_methods, reason = "servers' clocks are compared with this one")]
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            (index, surveyed(&address, answer, uid, now))
        });
    }
    let mut servers = asked.join_all().await;
    servers.sort_by_key(|(index, _)| *index);
    Survey::new(servers.into_iter().map(|(_, server)| server).collect())
}

/// Checks a server's answer to a request for a measurement.
pub fn endpoint(reply: control::MeasureReply) -> Result<Endpoint, PoolError> {
    let odd = || PoolError::new(Trouble::Protocol, "the server's endpoint has no valid id, key or address");
    let worker = reply.endpoint.ok_or_else(odd)?;
    let addresses = reply.data_addresses;
    if addresses.is_empty() || addresses.len() > MAX_ADDRESSES {
        return Err(odd());
    }
    Ok(Endpoint {
        server: reply.server,
        addresses,
        id: worker.id.try_into().map_err(|_| odd())?,
        fingerprint: worker.fingerprint.try_into().map_err(|_| odd())?,
        key: reply.key.try_into().map_err(|_| odd())?,
        clear: reply.clear,
    })
}

/// Describes a server by its answer, which arrived at `now` since the epoch.
fn surveyed(address: &str, answer: Answer, uid: u32, now: Duration) -> Surveyed {
    let (rtt, said) = match answer {
        Ok(answer) => answer,
        Err(error) => {
            let state = if error.trouble == Trouble::Refused { "unauthorized" } else { "offline" };
            // The row names the address already.
            let message = error.message.strip_prefix(address).and_then(|rest| rest.strip_prefix(": "));
            let trouble = message.unwrap_or(&error.message).to_owned();
            return Surveyed {
                name: address.to_owned(),
                address: address.to_owned(),
                state: state.into(),
                trouble: Some(trouble),
                ..Surveyed::default()
            };
        }
    };
    let last_24h =
        ["all", "machine", "you"].iter().zip(&said.usage).map(|(by, usage)| used(by, usage)).collect();
    let mut programs = said.client_programs;
    programs.retain(|program| uid == 0 || program.uid == uid);
    // The server read its clock about half a round trip ago.
    let then = (now.saturating_sub(rtt / 2)).as_micros() as i64;
    let cuda = said.cuda_version;
    Surveyed {
        cards: said
            .devices
            .iter()
            .enumerate()
            .map(|(index, d)| card(index, d, said.loads.get(index), &programs))
            .collect(),
        name: said.name,
        address: address.to_owned(),
        state: said.state,
        trouble: None,
        rtt_usec: rtt.as_micros() as u64,
        clock_skew_usec: (said.time_usec != 0).then(|| (said.time_usec as i64).saturating_sub(then)),
        software: said.software,
        protocol: said.protocol,
        oldest_protocol: said.oldest_protocol,
        driver_version: said.driver_version,
        cuda_version: if cuda == 0 { String::new() } else { format!("{}.{}", cuda / 1000, cuda % 1000 / 10) },
        data_addresses: said.data_addresses,
        leases: said.leases,
        waiting: said.waiting,
        programs: said.programs,
        last_24h,
    }
}

fn program(program: &control::CardProgram) -> CardProgram {
    CardProgram {
        pid: program.pid,
        uid: program.uid,
        user: program.user.clone(),
        name: program.name.clone(),
        lease: program.lease.clone(),
        used_bytes: program.used_bytes,
    }
}

fn used(by: &str, usage: &control::Usage) -> Usage {
    let sums = UsageSums {
        leases: usage.leases,
        programs: usage.programs,
        gpu_usec: usage.gpu_usec,
        busy_usec: usage.busy_usec,
        bytes_to_device: usage.bytes_to_device,
        bytes_from_device: usage.bytes_from_device,
        wait_p50_usec: usage.wait_p50_usec,
        wait_p95_usec: usage.wait_p95_usec,
    };
    Usage { by: by.into(), sums }
}

fn card(
    index: usize,
    device: &control::Device,
    load: Option<&control::CardLoad>,
    programs: &[control::CardProgram],
) -> Card {
    let here = programs.iter().filter(|program| program.uuid == device.uuid);
    Card {
        index: index as u32,
        uuid: device.uuid.clone(),
        name: device.name.clone(),
        state: device.state.clone(),
        memory_bytes: device.memory_bytes,
        free_bytes: device.memory_free_bytes,
        sharing: device.sharing.clone(),
        used_bytes: load.and_then(|load| load.used_bytes),
        utilization_percent: load.and_then(|load| load.utilization_percent),
        temperature_c: load.and_then(|load| load.temperature_c),
        power_mw: load.and_then(|load| load.power_mw),
        your_programs: here.map(program).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn servers_that_do_not_answer_keep_their_row() {
        let ask = |index| async move {
            match index {
                0 => std::future::pending().await,
                1 => Err(PoolError::new(Trouble::Refused, "b:1: revoked")),
                _ => Ok((
                    Duration::from_millis(2),
                    control::ServerDescription {
                        name: "gpu-c".into(),
                        state: "online".into(),
                        devices: vec![control::Device { uuid: "GPU-1".into(), ..Default::default() }],
                        ..Default::default()
                    },
                )),
            }
        };
        let survey = survey(["a:1", "b:1", "c:1"].map(String::from).to_vec(), 0, ask).await;
        let rows: Vec<_> = survey.servers.iter().map(|s| (s.name.as_str(), s.state.as_str())).collect();
        assert_eq!(rows, [("a:1", "offline"), ("b:1", "unauthorized"), ("gpu-c", "online")]);
        assert_eq!(survey.servers[0].trouble.as_deref(), Some("no answer within 3 s"));
        assert_eq!(survey.servers[1].trouble.as_deref(), Some("revoked"));
        assert_eq!(survey.servers[2].cards.len(), 1);
        assert_eq!(survey.servers[2].clock_skew_usec, None);
    }

    #[test]
    fn an_endpoint_without_a_valid_id_key_or_address_is_refused() {
        let worker = control::Worker { id: vec![1; 16], fingerprint: vec![2; 32] };
        let reply = control::MeasureReply {
            endpoint: Some(worker.clone()),
            key: vec![3; 32],
            server: "gpu-a".into(),
            data_addresses: vec!["gpu-a:7602".into()],
            clear: true,
        };
        let good = endpoint(reply.clone()).unwrap();
        assert_eq!((good.id, good.fingerprint, good.key, good.clear), ([1; 16], [2; 32], [3; 32], true));
        let short = control::Worker { id: vec![1; 15], ..worker.clone() };
        let long = control::Worker { fingerprint: vec![2; 33], ..worker };
        for bad in [
            control::MeasureReply { endpoint: None, ..reply.clone() },
            control::MeasureReply { endpoint: Some(short), ..reply.clone() },
            control::MeasureReply { endpoint: Some(long), ..reply.clone() },
            control::MeasureReply { key: Vec::new(), ..reply.clone() },
            control::MeasureReply { data_addresses: Vec::new(), ..reply.clone() },
            control::MeasureReply { data_addresses: vec!["a:1".into(); 17], ..reply },
        ] {
            assert_eq!(endpoint(bad).unwrap_err().trouble, Trouble::Protocol);
        }
    }

    #[test]
    fn users_see_their_own_programs_and_root_those_of_all() {
        let of = |uuid: &str, uid: u32| control::CardProgram {
            uuid: uuid.into(),
            uid,
            pid: 40 + uid,
            used_bytes: 1 << 20,
            ..Default::default()
        };
        let card = |uuid: &str| control::Device { uuid: uuid.into(), ..Default::default() };
        let said = control::ServerDescription {
            devices: vec![card("GPU-1"), card("GPU-2")],
            client_programs: vec![of("GPU-2", 7), of("GPU-2", 8), of("GPU-1", 8), of("GPU-9", 7)],
            ..Default::default()
        };
        let pids = |uid| {
            let server = surveyed("a:1", Ok((Duration::ZERO, said.clone())), uid, Duration::ZERO);
            let pids = |card: &Card| card.your_programs.iter().map(|program| program.pid).collect::<Vec<_>>();
            server.cards.iter().map(pids).collect::<Vec<_>>()
        };
        assert_eq!(pids(7), [vec![], vec![47]]);
        assert_eq!(pids(0), [vec![48], vec![47, 48]]);
        assert_eq!(pids(9), [vec![], vec![]] as [Vec<u32>; 2]);
    }

    #[test]
    fn skew_is_counted_from_the_middle_of_the_round_trip() {
        let said = control::ServerDescription { time_usec: 3_600_001_000, ..Default::default() };
        let server = surveyed("a:1", Ok((Duration::from_millis(2), said)), 0, Duration::from_millis(2));
        assert_eq!(server.clock_skew_usec, Some(3_600_000_000));
    }
}
