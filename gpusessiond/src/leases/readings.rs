//! NVML readings of the GPUs that a process would get.

use std::sync::Arc;

use gpusession_proto::control;
use gpusession_proto::grant::Denial;
use gpusession_proto::readings::{Answer, Device, Fault, Process, Query, View, uuid_bytes};

use crate::pool::{PoolServer, Trouble};

/// `NVML_ERROR_INVALID_ARGUMENT`: the query names a device that the process does not have.
const INVALID_ARGUMENT: u32 = 2;

/// A lease and the server that holds it.
pub struct Place {
    pub lease: control::Lease,
    pub server: Arc<dyn PoolServer>,
}

/// Queries the servers, each about its own devices only.
pub async fn ask(places: Vec<Place>, queries: Vec<Query>) -> Result<View, (Denial, String)> {
    let answer = Answer { status: INVALID_ARGUMENT, output: Vec::new() };
    let mut view = View { devices: Vec::new(), answers: vec![answer; queries.len()] };
    for Place { lease, server } in places {
        let has = |uuid: &[u8; 16]| lease.devices.iter().any(|d| uuid_bytes(&d.uuid).as_ref() == Some(uuid));
        let (which, mine): (Vec<usize>, Vec<_>) = queries
            .iter()
            .enumerate()
            .filter(|(_, query)| has(&query.device))
            .map(|(i, query)| {
                let Query { device, call, input } = query.clone();
                (i, control::ReadingQuery { device: device.to_vec(), call, input })
            })
            .unzip();
        let asked = control::ReadingsRequest { lease: lease.id.clone(), queries: mine };
        let reply = server.readings(asked).await.map_err(|e| match e.trouble {
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
                server: lease.server.clone(),
                lease: lease.id.clone(),
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
