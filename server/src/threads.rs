//! Threads of a process from `/proc`, for `gpuserver ps --threads`.

use std::fs;

use serde::{Deserialize, Serialize};

/// A thread of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thread {
    /// Thread id on the server's host.
    pub tid: u32,
    /// Name that the thread has set.
    pub name: String,
    /// State: `R` running or ready, `S` asleep, `D` waiting in the kernel (proc_pid_stat(5)).
    pub state: String,
    /// Time on CPUs, in user and kernel mode.
    pub cpu_usec: u64,
}

/// Lists the threads of a process, its first thread in front; empty if it has exited.
pub fn of_process(pid: u32) -> Vec<Thread> {
    let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten();
    let tick_usec = 1_000_000 / u64::try_from(ticks.unwrap_or(100)).unwrap_or(100).max(1);
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut threads: Vec<Thread> = tasks
        .filter_map(|task| parse(&fs::read_to_string(task.path().join("stat")).ok()?, tick_usec))
        .collect();
    // Thread ids wrap around, so the first thread need not have the smallest.
    threads.sort_by_key(|t| (t.tid != pid, t.tid));
    threads
}

/// Parses a line of `stat`; the thread's name may contain spaces and parentheses.
fn parse(stat: &str, tick_usec: u64) -> Option<Thread> {
    let (head, rest) = stat.rsplit_once(')')?;
    let (tid, name) = head.split_once(" (")?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.to_owned();
    // Fields 14 and 15: time in user mode and in kernel mode.
    let mut ticks = fields.skip(10).map(str::parse::<u64>);
    let (user, system) = (ticks.next()?.ok()?, ticks.next()?.ok()?);
    let cpu_usec = user.saturating_add(system).saturating_mul(tick_usec);
    Some(Thread { tid: tid.parse().ok()?, name: name.to_owned(), state, cpu_usec })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernels() {
        let line = "4711 (a) b (c) D 1 4711 4711 0 -1 4194304 100 0 0 0 7 5 0 0 20 0 3 0 5221 0 0 184\n";
        let expected = Thread { tid: 4711, name: "a) b (c".into(), state: "D".into(), cpu_usec: 120_000 };
        assert_eq!(parse(line, 10_000), Some(expected));
        for bad in ["", "1", "1 (x", "1 (x) S 1 2", "x (y) S 1 2 3 4 5 6 7 8 9 10 a b"] {
            assert_eq!(parse(bad, 10_000), None, "{bad:?}");
        }
    }

    #[test]
    fn our_own() {
        let thread = std::thread::Builder::new().name("looked-at".into());
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let thread = thread.spawn(move || wait.recv()).unwrap();
        let mut threads = Vec::new();
        // The thread sets its name once it runs.
        while !threads.iter().any(|t: &Thread| t.name == "looked-at") {
            threads = of_process(std::process::id());
        }
        assert!(threads.len() > 1 && threads[0].tid == std::process::id(), "{threads:?}");
        drop(end);
        let _ = thread.join();
        assert!(of_process(u32::MAX).is_empty());
    }
}
