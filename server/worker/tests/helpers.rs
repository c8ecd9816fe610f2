//! The monitor on the simulated driver, and workers whose memory moves to host memory.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use gpusession_proto::frame::op;
use gpusession_proto::message;
use gpusession_proto::readings::{Answer, FromMonitor, Query, ToMonitor, uuid_bytes};
use gpusession_proto::supervise::{FromWorker, ToWorker};
use gpusession_test_worker::{Client, MIB, Machine, WINDOW, Worker};

struct Monitor(Child, Option<ChildStdin>, ChildStdout);

impl Monitor {
    fn start(machine: &Machine) -> Self {
        let mut child = Command::new(gpusession_test_worker::program())
            .arg("--monitor")
            .arg(machine.driver())
            .arg("require")
            .env("SIMGPU_MACHINE", machine.name())
            .envs(machine.driver().parent().map(|folder| ("XDG_RUNTIME_DIR", folder)))
            .env("SIMGPU_DEVICES", "2")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take(), child.stdout.take().unwrap());
        Self(child, to, from)
    }

    fn receive(&mut self) -> FromMonitor {
        let mut prefix = [0; 4];
        self.2.read_exact(&mut prefix).unwrap();
        let mut body = vec![0; message::body_len(prefix).unwrap()];
        self.2.read_exact(&mut body).unwrap();
        message::decode(&body).unwrap()
    }

    fn send(&mut self, request: &ToMonitor) -> FromMonitor {
        self.1.as_mut().unwrap().write_all(&message::encode(request)).unwrap();
        self.receive()
    }

    fn ask(&mut self, device: usize, call: &str, input: &[u8]) -> Answer {
        let uuid = uuid_bytes(&format!("GPU-73696d67-7075-4000-8000-6770752d300{device}")).unwrap();
        let query = Query { device: uuid, call: call.into(), input: input.into() };
        let FromMonitor::Answers(answers) = self.send(&ToMonitor::Ask(vec![query])) else { panic!() };
        answers.into_iter().next().unwrap()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Checks that a process has restricted its system calls for good.
fn gave_up_its_rights(pid: u32) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    for line in ["Seccomp:\t2", "NoNewPrivs:\t1"] {
        assert!(status.contains(line), "{line}: {status}");
    }
}

fn ok(output: &[u8]) -> Answer {
    Answer { status: 0, output: output.into() }
}

#[test]
fn every_shape_of_a_question_is_answered() {
    let machine = Machine::new();
    put_nvml(&machine);
    let mut monitor = Monitor::start(&machine);
    assert!(
        matches!(monitor.receive(), FromMonitor::Ready { driver_version, .. } if !driver_version.is_empty())
    );
    gave_up_its_rights(monitor.0.id());
    let FromMonitor::Gpus(gpus) = monitor.send(&ToMonitor::Read) else { panic!() };
    assert_eq!(gpus.len(), 2);
    assert!(
        gpus.iter()
            .all(|g| g.memory_used_bytes == Some(0) && g.temperature_c.is_some() && g.processes.is_empty())
    );

    // Numbers as input and output; the answers of two devices differ.
    assert_eq!(monitor.ask(0, "nvmlDeviceGetTemperature", &[0; 4]), ok(&36u32.to_le_bytes()));
    assert_eq!(monitor.ask(1, "nvmlDeviceGetTemperature", &[0; 4]), ok(&37u32.to_le_bytes()));
    assert_eq!(monitor.ask(1, "nvmlDeviceGetTemperature", &[9, 0, 0, 0]).status, 2, "NVML's own error");
    // A text, a list, a structure, a value of a field, a peer.
    assert_eq!(monitor.ask(0, "nvmlDeviceGetSerial", &[]), ok(b"\x0d\0\0\x000000000000001"));
    let clocks: Vec<u8> = [2u32, 5001, 405].iter().flat_map(|n| n.to_le_bytes()).collect();
    assert_eq!(monitor.ask(0, "nvmlDeviceGetSupportedMemoryClocks", &[]), ok(&clocks));
    let version = (12u32 | 1 << 24).to_le_bytes();
    let input = [version, [0; 4], [0; 4]].concat();
    assert_eq!(
        monitor.ask(0, "nvmlDeviceGetTemperatureV", &input),
        ok(&[version, [0; 4], [36, 0, 0, 0]].concat())
    );
    let newer = [(12u32 | 2 << 24).to_le_bytes(), [0; 4], [0; 4]].concat();
    assert_eq!(monitor.ask(0, "nvmlDeviceGetTemperatureV", &newer).status, 25);
    let field = monitor.ask(1, "nvmlDeviceGetFieldValues", &82u64.to_le_bytes());
    assert_eq!((field.status, field.output.len(), field.output[32]), (0, 40, 41));
    let peer = uuid_bytes("GPU-73696d67-7075-4000-8000-6770752d3001").unwrap();
    assert_eq!(monitor.ask(0, "nvmlDeviceGetTopologyCommonAncestor", &peer), ok(&40u32.to_le_bytes()));

    // Unsupported by this NVML, absent from the table, a change of state, malformed input.
    assert_eq!(monitor.ask(0, "nvmlDeviceGetModuleId", &[]).status, 3);
    assert_eq!(monitor.ask(0, "system", &[]).status, 13);
    assert_eq!(monitor.ask(0, "nvmlDeviceSetPersistenceMode", &[0; 4]).status, 3);
    assert_eq!(monitor.ask(0, "nvmlDeviceGetTemperature", &[]).status, 2);
    assert_eq!(monitor.ask(7, "nvmlDeviceGetPowerUsage", &[]).status, 2, "a device that is not there");

    monitor.1 = None;
    assert!(monitor.0.wait().unwrap().success(), "it ends with its input");
}

#[test]
fn without_nvml_it_says_so() {
    let machine = Machine::new();
    let mut monitor = Monitor::start(&machine);
    assert!(matches!(monitor.receive(), FromMonitor::Failed(why) if why.contains("libnvidia-ml.so.1")));
}

/// Has a paused worker move its memory.
fn moves(worker: &mut Worker, order: &ToWorker) {
    worker.tell(order);
    let said = worker.wait_for(|m| matches!(m, FromWorker::Moved { .. }));
    assert_eq!(said, FromWorker::Moved { failed: None });
}

/// Returns a worker inside its restrictions, which has paused, and its program with data.
fn paused(machine: &std::sync::Arc<Machine>) -> (Worker, Client) {
    let mut worker = Worker::start(machine);
    let client = worker.client(false);
    client.call(op::ALLOC, &[WINDOW, 2 * MIB, 0]);
    client.put(WINDOW, b"kept");
    assert_eq!(client.get(WINDOW, 4), b"kept");
    gave_up_its_rights(worker.pid());
    loop {
        worker.tell(&ToWorker::Pause);
        // Right after an answer, the worker may not have ended its work.
        if worker.wait_for(|m| matches!(m, FromWorker::Paused { .. })) == (FromWorker::Paused { quiet: true })
        {
            return (worker, client);
        }
    }
}

#[test]
fn a_worker_moves_its_own_memory_after_it_gave_up_its_rights() {
    let machine = Machine::new();
    put_nvml(&machine);
    let mut monitor = Monitor::start(&machine);
    monitor.receive();
    let (mut worker, client) = paused(&machine);
    let mut used = || match monitor.send(&ToMonitor::Read) {
        FromMonitor::Gpus(gpus) => gpus.iter().filter_map(|gpu| gpu.memory_used_bytes).sum::<u64>(),
        other => panic!("{other:?}"),
    };
    for round in 0..3 {
        assert!(used() >= 2 * MIB, "round {round}");
        moves(&mut worker, &ToWorker::MoveOut { limit_ms: 10_000 });
        assert_eq!(used(), 0, "round {round}");
        moves(&mut worker, &ToWorker::MoveBack);
    }
    worker.tell(&ToWorker::MoveBack);
    let said = worker.wait_for(|m| matches!(m, FromWorker::Moved { .. }));
    assert!(
        matches!(&said, FromWorker::Moved { failed: Some(failed) } if failed.call == "cuCheckpointProcessRestore"),
        "{said:?}"
    );
    worker.tell(&ToWorker::Resume);
    assert_eq!(client.get(WINDOW, 4), b"kept");
}

#[test]
fn a_helper_brings_back_memory_that_an_earlier_release_has_parked() {
    let machine = Machine::new();
    let (mut worker, client) = paused(&machine);
    moves(&mut worker, &ToWorker::MoveOut { limit_ms: 10_000 });
    let mut helper = Command::new(gpusession_test_worker::program())
        .arg("--parked")
        .arg(machine.driver())
        .args(["require", &worker.pid().to_string()])
        .env("SIMGPU_MACHINE", machine.name())
        .envs(machine.driver().parent().map(|folder| ("XDG_RUNTIME_DIR", folder)))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(helper.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "parked");
    gave_up_its_rights(helper.id());
    helper.stdin.take().unwrap().write_all(b"back\n").unwrap();
    assert_eq!(said.next().unwrap().unwrap(), "back");
    assert!(helper.wait().unwrap().success());
    worker.tell(&ToWorker::Resume);
    assert_eq!(client.get(WINDOW, 4), b"kept");
}

/// Puts the simulated NVML into the folder of the simulated driver.
fn put_nvml(machine: &Machine) {
    std::os::unix::fs::symlink("libcuda.so.1", machine.driver().with_file_name("libnvidia-ml.so.1")).unwrap();
}
