//! NVML readings of the GPUs that a process would get.

use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::control;
use gpusession_proto::grant::Denial;
use gpusession_proto::readings::{Answer, Device, Fault, Process, Query, View, uuid_bytes};

use tokio::time::{Instant, sleep};

use super::reported::Reported;
use crate::pool::{PoolError, PoolServer, Trouble};

/// Time for which a query waits for its machine's turn; the library waits longer.
const RATE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two attempts.
const RATE_INTERVAL: Duration = Duration::from_millis(100);
/// `NVML_ERROR_INVALID_ARGUMENT`: the query names a device that the process does not have.
const INVALID_ARGUMENT: u32 = 2;

/// A lease and the server that holds it.
pub struct Place {
    pub lease: String,
    pub reported: Reported,
    pub server: Arc<dyn PoolServer>,
}

/// Queries a server; waits while this machine has exhausted its rate there.
///
/// A program would take a refusal for a lost GPU, or for a link that is down.
async fn patiently(
    server: &Arc<dyn PoolServer>,
    asked: control::ReadingsRequest,
) -> Result<control::ReadingsReply, PoolError> {
    let until = Instant::now() + RATE_TIMEOUT;
    loop {
        match server.readings(asked.clone()).await {
            Err(e) if e.trouble == Trouble::LimitExceeded && Instant::now() < until => {
                sleep(RATE_INTERVAL).await;
            }
            reply => return reply,
        }
    }
}

/// Queries the servers, each about its own devices only.
pub async fn ask(places: Vec<Place>, queries: Vec<Query>) -> Result<View, (Denial, String)> {
    let answer = Answer { status: INVALID_ARGUMENT, output: Vec::new() };
    let mut view = View { devices: Vec::new(), answers: vec![answer; queries.len()] };
    for Place { lease, reported, server } in places {
        let has =
            |uuid: &[u8; 16]| reported.devices.iter().any(|d| uuid_bytes(&d.uuid).as_ref() == Some(uuid));
        let (which, mine): (Vec<usize>, Vec<_>) = queries
            .iter()
            .enumerate()
            .filter(|(_, query)| has(&query.device))
            .map(|(i, query)| {
                let Query { device, call, input } = query.clone();
                (i, control::ReadingQuery { device: device.to_vec(), call, input })
            })
            .unzip();
        let asked = control::ReadingsRequest { lease: lease.clone(), queries: mine };
        let reply = patiently(&server, asked).await.map_err(|e| match e.trouble {
            Trouble::Protocol => (Denial::ProtocolMismatch, e.message),
            _ => (Denial::NotReady, e.message),
        })?;
        for (i, answer) in which.into_iter().zip(reply.answers) {
            view.answers[i] = Answer { status: answer.status, output: answer.output };
        }
        for reading in reply.devices {
            let Some(device) = reading.device else { continue };
            let Some(uuid) = uuid_bytes(&device.uuid) else { continue };
            view.devices.push(Device {
                uuid,
                server: reported.server.clone(),
                lease: lease.clone(),
                driver_version: reply.driver_version.clone(),
                nvml_version: reply.nvml_version.clone(),
                cuda_version: reply.cuda_version,
                name: device.name,
                pci_address: device.pci_address,
                compute: (device.compute_major, device.compute_minor),
                memory_bytes: device.limit_bytes,
                used_bytes: reading.used_bytes,
                processes: reading
                    .processes
                    .into_iter()
                    .map(|p| Process { pid: p.pid, name: p.name, used_bytes: p.used_bytes })
                    .collect(),
                faults: reading
                    .faults
                    .into_iter()
                    .map(|f| Fault { number: f.number, event: f.event, data: f.data })
                    .collect(),
            });
        }
    }
    Ok(view)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leases::sim::SimServer;

    #[tokio::test(start_paused = true)]
    async fn a_query_waits_while_its_machine_has_no_rate_left() {
        let server = SimServer::new("gpu-a", 1);
        let lease =
            server.allocate(control::AllocateRequest { gpus: 1, ..Default::default() }).await.unwrap();
        let ask = |refusals| {
            server.with(|state| state.refuses_readings = refusals);
            let (lease, reported) = (lease.id.clone(), Reported::granted(&lease));
            ask(vec![Place { lease, reported, server: Arc::new(server.clone()) }], Vec::new())
        };
        assert_eq!(ask(20).await.unwrap().devices.len(), 1);
        let (denial, reason) = ask(u32::MAX).await.unwrap_err();
        assert_eq!((denial, reason.as_str()), (Denial::NotReady, "the client asks more often"));
    }
}
