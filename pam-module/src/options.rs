//! The module's arguments in `/etc/pam.d`.

use std::path::PathBuf;
use std::time::Duration;

/// What the administrator wrote behind `pam_gpusession.so`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// `timeout_ms`: the longest time that the daemon may hold a login up, at most 5 s.
    pub timeout: Duration,
    /// `min_uid`: users below it are left alone.
    pub min_uid: u32,
    /// `skip_services`: PAM services that are left alone, separated by commas.
    pub skip_services: Vec<String>,
    /// `allow`: the variables that the daemon may set, separated by commas, each with an `*` for any end. Without it, all that
    /// [`gpusession_login::check`] lets pass.
    pub allow: Vec<String>,
    /// `socket`: where the daemon listens.
    pub socket: PathBuf,
    /// `debug`: says in the log why a session was not bound.
    pub debug: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_millis(500),
            min_uid: 1000,
            skip_services: vec!["systemd-user".into(), "gdm-launch-environment".into()],
            allow: vec!["*".into()],
            socket: "/run/gpusession/pam.sock".into(),
            debug: false,
        }
    }
}

impl Options {
    /// Reads them. What cannot be read has its default: a login does not fail for it.
    pub fn parse<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Self {
        let mut options = Self::default();
        for argument in arguments {
            let (key, value) = argument.split_once('=').unwrap_or((argument, ""));
            match key {
                "timeout_ms" => {
                    if let Ok(ms @ 1..) = value.parse::<u64>() {
                        options.timeout = Duration::from_millis(ms.min(5000));
                    }
                }
                "min_uid" => options.min_uid = value.parse().unwrap_or(options.min_uid),
                "skip_services" => options.skip_services = value.split(',').map(str::to_owned).collect(),
                "allow" => options.allow = value.split(',').map(str::to_owned).collect(),
                "socket" if value.starts_with('/') => options.socket = value.into(),
                "debug" => options.debug = true,
                _ => {}
            }
        }
        options
    }

    /// Whether a service is left alone.
    pub fn skips(&self, service: &str) -> bool {
        self.skip_services.iter().any(|s| s == service)
    }

    /// Whether the daemon may set a variable. The session's id is what the module is there for.
    pub fn allows(&self, name: &str) -> bool {
        let fits = |pattern: &String| match pattern.strip_suffix('*') {
            Some(begin) => name.starts_with(begin),
            None => name == pattern,
        };
        name == "GPUSESSION_ID" || self.allow.iter().any(fits)
    }
}
