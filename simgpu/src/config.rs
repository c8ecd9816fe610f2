//! Configuration of the simulated machine; `simgpu/configuration.md` describes every key.

use std::collections::HashMap;

/// Upper bound of the devices of a machine.
pub const DEVICES: usize = 128;

/// Policy for images that contain only machine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CubinPolicy {
    /// Loads the image and finds its kernels, but executes nothing.
    Pretend,
    /// Fails with 209, as for code of another architecture.
    Refuse,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    pub devices: u32,
    pub memory: u64,
    /// Bytes of device memory that each context takes.
    pub context: u64,
    pub name: String,
    /// Processes with the same machine name share its memory.
    pub machine: String,
    /// Whether processes of other users share its memory, too.
    pub all_users: bool,
    pub driver_version: u32,
    /// `CUcomputemode` that cards report; no process is refused for it.
    pub compute_mode: u32,
    pub sms: u32,
    pub seed: u64,
    /// Number of entries that a stream holds before a submission blocks.
    pub queue: usize,
    /// Upper bound of injected delays before an entry runs, in microseconds; one in `delay_one_in`
    /// entries is delayed.
    pub delay_us: u64,
    pub delay_one_in: u64,
    /// Milliseconds added to every compilation.
    pub jit_ms: u64,
    pub cubin: CubinPolicy,
    pub ignore_address_hints: bool,
    /// Whether devices can access each other's memory.
    pub peers: bool,
    /// Start address of device memory; 0 for the kernel's choice.
    pub device_base: u64,
    /// Start address of stream-ordered allocations.
    pub pool_base: u64,
    /// Byte that fresh device memory is filled with, if any.
    pub poison: Option<u8>,
    /// Interval, in allocations, of injected failures; 0 for none.
    pub fail_alloc_every: u64,
    /// Number, from 1, of the context that fails with 2; 0 for none.
    pub fail_context_at: u64,
    /// Number, from 1, of the launch that fails with `fault_code`; 0 for none.
    pub fault_at_launch: u64,
    pub fault_code: u32,
    pub export_memory: bool,
    /// Whether processes can be checkpointed; `checkpoint_ms` is the least duration of each step.
    pub checkpoint: bool,
    pub checkpoint_ms: u64,
    pub threads: usize,
    pub concurrent_managed: bool,
    /// Whether kernels say that they reach all memory of their process.
    pub pageable_access: bool,
    /// Size that the driver claims for every parameter of a kernel; 0 for the true one.
    pub param_size: u32,
    pub trace: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            devices: 1,
            memory: 2 << 30,
            context: 0,
            name: "gpusession simulated GPU".into(),
            machine: "default".into(),
            all_users: false,
            driver_version: 13000,
            compute_mode: 0,
            sms: 40,
            seed: 1,
            queue: 1020,
            delay_us: 0,
            delay_one_in: 1,
            jit_ms: 0,
            cubin: CubinPolicy::Pretend,
            ignore_address_hints: false,
            peers: true,
            device_base: 0,
            pool_base: 0x3_0200_0000,
            poison: None,
            fail_alloc_every: 0,
            fail_context_at: 0,
            fault_at_launch: 0,
            fault_code: 700,
            export_memory: true,
            checkpoint: true,
            checkpoint_ms: 0,
            threads: 0,
            concurrent_managed: false,
            pageable_access: false,
            param_size: 0,
            trace: false,
        }
    }
}

fn size(text: &str) -> Option<u64> {
    let (digits, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
    let shift = match unit.trim() {
        "" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    digits.trim().parse::<u64>().ok()?.checked_shl(shift)
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(&hex.replace('_', ""), 16).ok(),
        None => text.replace('_', "").parse().ok(),
    }
}

fn flag(text: &str) -> Option<bool> {
    match text {
        "1" | "true" | "on" | "yes" => Some(true),
        "0" | "false" | "off" | "no" => Some(false),
        _ => None,
    }
}

impl Config {
    /// Sets one key; returns `false` for an unknown key or an invalid value.
    fn set(&mut self, key: &str, value: &str) -> bool {
        let mut apply = || -> Option<()> {
            match key {
                "devices" => self.devices = number(value).filter(|n| *n <= DEVICES as u64)? as u32,
                "memory" => self.memory = size(value)?,
                "context" => self.context = size(value)?,
                "name" => self.name = value.into(),
                "machine" => self.machine = value.into(),
                "all_users" => self.all_users = flag(value)?,
                "driver_version" => self.driver_version = number(value)? as u32,
                "compute_mode" => self.compute_mode = number(value).filter(|mode| *mode <= 3)? as u32,
                "sms" => self.sms = number(value).filter(|n| (1..=1024).contains(n))? as u32,
                "seed" => self.seed = number(value)?,
                "queue" => self.queue = number(value).filter(|n| *n > 0)? as usize,
                "delay_us" => self.delay_us = number(value)?,
                "delay_one_in" => self.delay_one_in = number(value)?.max(1),
                "jit_ms" => self.jit_ms = number(value)?,
                "cubin" => {
                    self.cubin = match value {
                        "pretend" => CubinPolicy::Pretend,
                        "refuse" => CubinPolicy::Refuse,
                        _ => return None,
                    }
                }
                "ignore_address_hints" => self.ignore_address_hints = flag(value)?,
                "peers" => self.peers = flag(value)?,
                "device_base" => self.device_base = number(value)?,
                "pool_base" => self.pool_base = number(value)?,
                "poison" => self.poison = if value == "off" { None } else { Some(number(value)? as u8) },
                "fail_alloc_every" => self.fail_alloc_every = number(value)?,
                "fail_context_at" => self.fail_context_at = number(value)?,
                "fault_at_launch" => self.fault_at_launch = number(value)?,
                "fault_code" => self.fault_code = number(value)? as u32,
                "export_memory" => self.export_memory = flag(value)?,
                "checkpoint" => self.checkpoint = flag(value)?,
                "checkpoint_ms" => self.checkpoint_ms = number(value)?,
                "threads" => self.threads = number(value)? as usize,
                "concurrent_managed" => self.concurrent_managed = flag(value)?,
                "pageable_access" => self.pageable_access = flag(value)?,
                "param_size" => self.param_size = number(value)? as u32,
                "trace" => self.trace = flag(value)?,
                _ => return None,
            }
            Some(())
        };
        apply().is_some()
    }

    /// Reads `key = value` lines, and returns those that are invalid.
    fn read(&mut self, text: &str) -> Vec<String> {
        let mut bad = Vec::new();
        for (n, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or("").trim();
            if line.is_empty() || line.starts_with('[') {
                continue;
            }
            let known =
                line.split_once('=').is_some_and(|(k, v)| self.set(k.trim(), v.trim().trim_matches('"')));
            if !known {
                bad.push(format!("line {}: {line}", n + 1));
            }
        }
        bad
    }

    /// Loads the file named by `SIMGPU_CONF`, then `SIMGPU_<KEY>` of the environment for each key.
    pub fn load() -> Config {
        Self::from(std::env::vars().filter(|(k, _)| k.starts_with("SIMGPU_")).collect())
    }

    fn from(env: HashMap<String, String>) -> Config {
        let mut config = Config::default();
        let mut bad = Vec::new();
        if let Some(path) = env.get("SIMGPU_CONF") {
            match std::fs::read_to_string(path) {
                Ok(text) => bad.extend(config.read(&text).into_iter().map(|b| format!("{path}: {b}"))),
                Err(e) => bad.push(format!("{path}: {e}")),
            }
        }
        for (key, value) in env.iter().filter(|(k, _)| *k != "SIMGPU_CONF") {
            if !config.set(&key["SIMGPU_".len()..].to_ascii_lowercase(), value) {
                bad.push(format!("{key}={value}"));
            }
        }
        // Printed, since a driver cannot report a bad configuration and a test must not mistype a
        // key unnoticed.
        for b in bad {
            eprintln!("simgpu: configuration: unknown key or invalid value: {b}; ignored");
        }
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_variables() {
        let mut c = Config::default();
        let bad = c.read("# machine\ndevices = 2\nmemory = \"512MiB\"\ncubin=refuse\nnonsense=1\n");
        assert_eq!((c.devices, c.memory, c.cubin), (2, 512 << 20, CubinPolicy::Refuse));
        assert_eq!(bad, ["line 5: nonsense=1"]);
        let env = [("SIMGPU_QUEUE", "8"), ("SIMGPU_DEVICE_BASE", "0x7000_0000")];
        let c = Config::from(env.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect());
        assert_eq!((c.queue, c.device_base), (8, 0x7000_0000));
    }
}
