//! Readings of a lease's GPUs for its client, as NVML shows them. Memory and processes are the
//! lease's own, the rest is the card's.

use gpusession_nvml_calls::{self as table, Class};
use gpusession_proto::control as wire;
use gpusession_proto::readings::{MAX_BYTES, MAX_QUERIES, Query};
use tonic::Status;

use super::Pool;
use super::describe::device;
use crate::lease::Lease;
use crate::registry::GpuUse;

/// NVML status of a query without an answer.
///
/// The server's NVML is silent, or only a later version knows the query.
const NOT_SUPPORTED: u32 = 3;

/// Answers a request of the client that holds the lease.
pub async fn answer(
    pool: &Pool,
    lease: &Lease,
    gpus: &[GpuUse],
    queries: Vec<wire::ReadingQuery>,
) -> Result<wire::ReadingsReply, Status> {
    let mine: Vec<[u8; 16]> = shares(lease, gpus).filter_map(|(_, gpu)| gpu.gpu.uuid_bytes()).collect();
    let queries = check(queries, &mine)?;
    let known: Vec<_> = queries.iter().flatten().cloned().collect();
    let asked = known.len();
    let mut answers = pool.monitor().ask(known).await.filter(|a| a.len() == asked).into_iter().flatten();
    let answer = |query: &Option<Query>| {
        let told = query.as_ref().and_then(|_| answers.next());
        let (status, output) = told.map_or((NOT_SUPPORTED, Vec::new()), |a| (a.status, a.output));
        wire::ReadingAnswer { status, output }
    };
    let answers = queries.iter().map(answer).collect();
    // Memory comes from the ledger, as for limits; NVML's numbers of workers are part of it.
    let running = pool.supervisor().processes(&lease.id);
    let devices = shares(lease, gpus)
        .enumerate()
        .map(|(place, (share, gpu))| {
            let uuid = gpu.gpu.uuid_bytes().unwrap_or_default();
            let processes: Vec<_> = running
                .iter()
                .map(|(process, memory)| wire::ReadingProcess {
                    pid: process.pid,
                    name: process.program.clone(),
                    used_bytes: memory.get(place).copied().unwrap_or(0),
                })
                .collect();
            let faults = pool.monitor().faults(&uuid).into_iter();
            wire::DeviceReading {
                device: Some(device(&gpu.gpu, Some(share), "leased", gpu)),
                used_bytes: processes.iter().map(|p| p.used_bytes).sum(),
                processes,
                faults: faults
                    .map(|f| wire::ReadingFault { number: f.number, event: f.event, data: f.data })
                    .collect(),
            }
        })
        .collect();
    let versions = pool.monitor().versions().unwrap_or_default();
    Ok(wire::ReadingsReply {
        devices,
        answers,
        driver_version: pool.driver_version(),
        nvml_version: versions.nvml,
        cuda_version: pool.facts().cuda_version,
    })
}

fn shares<'a>(
    lease: &'a Lease,
    gpus: &'a [GpuUse],
) -> impl Iterator<Item = (&'a crate::lease::Share, &'a GpuUse)> {
    lease.shares.iter().filter_map(|s| Some((s, gpus.iter().find(|g| g.gpu.uuid == s.gpu)?)))
}

/// Accepts queries about the lease's own devices; `None` for each that the table does not have.
fn check(queries: Vec<wire::ReadingQuery>, mine: &[[u8; 16]]) -> Result<Vec<Option<Query>>, Status> {
    if queries.len() > MAX_QUERIES {
        return Err(Status::invalid_argument(format!("more than {MAX_QUERIES} questions in a request")));
    }
    let (mut inputs, mut outputs) = (0, 0);
    let mut checked = Vec::with_capacity(queries.len());
    for query in queries {
        let wrong = |what: &str| {
            let name: String = query.call.chars().filter(|c| !c.is_control()).take(64).collect();
            Status::invalid_argument(format!("{name}: {what}"))
        };
        let uuid: [u8; 16] = query
            .device
            .as_slice()
            .try_into()
            .ok()
            .filter(|uuid| mine.contains(uuid))
            .ok_or_else(|| wrong("not a device of the lease"))?;
        inputs += query.input.len();
        let call = table::find(&query.call).map(|(_, call)| call);
        let Some(call) = call.filter(|c| matches!(c.class, Class::Forward(..))) else {
            checked.push(None);
            continue;
        };
        let peers = call.peers(&query.input).ok_or_else(|| wrong("its input is malformed"))?;
        if !peers.iter().all(|peer| mine.iter().any(|m| m == peer)) {
            return Err(wrong("not a device of the lease"));
        }
        outputs += call.output();
        checked.push(Some(Query { device: uuid, call: query.call, input: query.input }));
    }
    if inputs > MAX_BYTES || outputs > MAX_BYTES {
        return Err(Status::invalid_argument("too many questions in a request; ask in several"));
    }
    Ok(checked)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(device: u8, call: &str, input: &[u8]) -> wire::ReadingQuery {
        wire::ReadingQuery { device: vec![device; 16], call: call.into(), input: input.into() }
    }

    #[test]
    fn only_questions_of_the_table_about_the_leases_own_devices() {
        let mine = [[1; 16], [2; 16]];
        let allowed = |q| check(vec![q], &mine).is_ok_and(|checked| checked[0].is_some());
        assert!(allowed(query(1, "nvmlDeviceGetPowerUsage", &[])));
        assert!(allowed(query(1, "nvmlDeviceGetTemperature", &[0; 4])));
        assert!(allowed(query(1, "nvmlDeviceOnSameBoard", &[2; 16])));
        assert!(allowed(query(2, "nvmlDeviceGetFieldValues", &[1, 0, 0, 0, 0, 0, 0, 0])));
        assert!(!allowed(query(3, "nvmlDeviceGetPowerUsage", &[])), "another lease's device");
        assert!(!allowed(query(1, "nvmlDeviceOnSameBoard", &[3; 16])), "another lease's device as peer");
        assert!(!allowed(query(1, "nvmlDeviceGetTemperature", &[])), "input too short");
        assert!(!allowed(query(1, "nvmlDeviceSetPersistenceMode", &[0; 4])), "a change");
        assert!(!allowed(query(1, "nvmlDeviceGetComputeRunningProcesses_v3", &[])), "others' processes");
        assert!(!allowed(query(1, "system", &[])));
        // A client of a later version sends known and unknown queries in one request.
        let newer =
            vec![query(1, "nvmlDeviceGetPowerUsage", &[]), query(1, "nvmlDeviceGetSomethingNew", &[])];
        let checked: Vec<_> = check(newer, &mine).unwrap().iter().map(Option::is_some).collect();
        assert_eq!(checked, [true, false]);
        let many = |n| check(vec![query(1, "nvmlDeviceGetSupportedMemoryClocks", &[]); n], &mine);
        assert!(many(2).is_ok());
        assert!(many(100).is_err(), "answers that would not fit");
        assert!(check(vec![query(1, "nvmlDeviceGetPowerUsage", &[]); MAX_QUERIES + 1], &mine).is_err());
    }
}
