//! A server with real workers on the simulated driver, and programs that check their data.

use std::time::Duration;

use gpusession_link::LinkLost;
use gpusession_link::lanes::{HostRange, On};
use gpusession_proto::control::{Lease, RenewRequest, Worker};
use gpusession_proto::frame::op;
use gpusession_proto::grant::Endpoint;
use gpusession_proto::preface::Key;
use gpusession_proto::ticket::Ticket;
use gpusession_test_server::{Client, Server};
use gpusession_test_support::{Artefact, artefact};
use gpusession_test_worker::{CALLER, Client as Linked, MIB, Random, WINDOW};

/// Prepares a server with real workers on the simulated driver.
pub async fn prepare(lines: &str) -> Server {
    let mut server = Server::prepare("libcuda.so.1", lines).await;
    let sim = server.path("sim");
    std::fs::create_dir(&sim).unwrap();
    let library = artefact("simgpu", Artefact::Library("libsimgpu.so"));
    std::os::unix::fs::symlink(library, sim.join("libcuda.so.1")).unwrap();
    server.configure("sim/libcuda.so.1", lines);
    let machine =
        format!("attacks_{}_{}", std::process::id(), server.folder.path().file_name().unwrap().display());
    server.variables = vec![
        ("GPUSERVER_WORKER", artefact("gpuserver-worker", Artefact::Program("gpuserver-worker")).into()),
        ("SIMGPU_MACHINE", machine.replace('.', "_").into()),
    ];
    server
}

/// Renews a lease until the end of the test's runtime, as the daemon does.
pub fn keep(vm: &Client, lease: &Lease) {
    let (mut vm, lease) = (vm.clone(), lease.id.clone());
    tokio::spawn(async move {
        loop {
            let request = RenewRequest { leases: vec![lease.clone()], boot_id: "b1".into() };
            let _ = vm.pool.renew(request).await;
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
    });
}

/// Returns the grant of a worker, as the daemon makes it, with another address of its data port.
pub fn endpoint(lease: &Lease, worker: &Worker, address: &str) -> Endpoint {
    let id: [u8; 16] = worker.id.as_slice().try_into().unwrap();
    let key: [u8; 32] = lease.ticket_key.as_slice().try_into().unwrap();
    let ticket = Ticket {
        lease: lease.id.clone(),
        worker: id,
        uid: 1000,
        user: "alice".into(),
        pid: 4242,
        boot_id: [1; 16],
        issued_usec: 12,
        nonce: [9; 16],
        program: "python3".into(),
        executable: "/usr/bin/python3".into(),
    };
    Endpoint {
        server: lease.server.clone(),
        addresses: vec![address.into()],
        worker: id,
        key: Key::new(&key, &id, 1000),
        fingerprint: lease.encrypted.then(|| worker.fingerprint.as_slice().try_into().unwrap()),
        ticket: ticket.seal(&key),
        lease: lease.id.clone(),
        devices: 1,
    }
}

/// A program with device memory.
pub struct Program {
    client: Linked,
    random: Random,
}

impl Program {
    /// Bytes of its device memory.
    pub const ROOM: u64 = 16 * MIB;

    /// Connects to its worker.
    pub fn open(endpoint: &Endpoint, seed: u64) -> Result<Self, LinkLost> {
        let program = Self { client: Linked::open(endpoint)?, random: Random::new(seed) };
        program.call(op::ALLOC, &[WINDOW, Self::ROOM, 0])?;
        Ok(program)
    }

    /// Makes a call that succeeds if its worker is there.
    fn call(&self, op: u16, words: &[u64]) -> Result<(), LinkLost> {
        let status = self.client.try_call(op, words)?.status;
        assert_eq!(status, 0, "operation {op}");
        Ok(())
    }

    /// Copies `len` bytes to the device and back, on the lanes or in frames, and compares each.
    ///
    /// # Panics
    /// If other bytes come back without an error.
    pub fn copies(&mut self, len: usize, on_lanes: bool) -> Result<(), LinkLost> {
        let bytes: Vec<u8> =
            (0..len.div_ceil(8)).flat_map(|_| self.random.draw().to_le_bytes()).take(len).collect();
        let back = match on_lanes {
            true => {
                self.put(&bytes)?;
                self.get(len)?
            }
            false => {
                let request = self.client.link.call(op::COPY_TO_DEVICE, CALLER, |w| {
                    [WINDOW, len as u64, 0, 1].into_iter().for_each(|word| w.word(word));
                    w.bytes(&bytes);
                });
                assert_eq!(request?.status, 0);
                let reply = self.client.try_call(op::COPY_FROM_DEVICE, &[WINDOW, len as u64, 0, 1])?;
                assert_eq!(reply.status, 0);
                reply.reader().bytes().unwrap().to_vec()
            }
        };
        let other = bytes.iter().zip(&back).position(|(sent, back)| sent != back);
        assert!(bytes.len() == back.len() && other.is_none(), "other data came back, at {other:?} of {len}");
        Ok(())
    }

    fn lost(&self) -> LinkLost {
        let heard = self.client.heard.0.lock().unwrap();
        LinkLost(heard.last().cloned().unwrap_or_else(|| "its link is lost".into()))
    }

    fn put(&self, bytes: &[u8]) -> Result<(), LinkLost> {
        let lanes = self.client.link.lanes()?;
        let begun = self.client.link.begin_call(op::COPY_TO_DEVICE, CALLER, |w| {
            [WINDOW, bytes.len() as u64, 0, 0].into_iter().for_each(|word| w.word(word));
        })?;
        // SAFETY: `bytes` outlives the transfer, whose end `wait_sent` awaits.
        let upload = lanes.upload(unsafe { HostRange::new(bytes.as_ptr() as usize, bytes.len()) }, true);
        let sent = lanes.send(begun.seq, upload);
        if !self.client.link.wait_sent(&sent) {
            return Err(self.lost());
        }
        assert_eq!(self.client.link.finish_call(begun)?.status, 0);
        Ok(())
    }

    fn get(&self, len: usize) -> Result<Vec<u8>, LinkLost> {
        self.client.link.lanes()?;
        let mut bytes = vec![0u8; len];
        let target = bytes.as_mut_ptr() as usize;
        let begun = self.client.link.begin_call(op::COPY_FROM_DEVICE, CALLER, |w| {
            // SAFETY: `bytes` outlives the transfer, whose end `wait` awaits.
            let range = unsafe { HostRange::new(target, len) };
            let on = On { ctx: 0, stream: 0, blocking: true };
            self.client.link.down.expect(w.seq(), range, on, false, Vec::new());
            [WINDOW, len as u64, 0, 1].into_iter().for_each(|word| w.word(word));
        });
        let begun = match begun {
            Ok(begun) => begun,
            Err(lost) => {
                // A lane may still write there.
                bytes.leak();
                return Err(lost);
            }
        };
        let seq = begun.seq;
        let answered = self.client.link.finish_call(begun);
        let landed = self.client.link.down.wait(seq);
        assert_eq!(answered?.status, 0);
        if landed == 0 { Ok(bytes) } else { Err(self.lost()) }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.client.link.close();
    }
}
