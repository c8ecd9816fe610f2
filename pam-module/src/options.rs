//! The module's arguments in `/etc/pam.d`.

use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `pam_gpusession.so`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// `timeout_ms`: the longest time that the daemon may delay a login, at most 5 s.
    pub timeout: Duration,
    /// `min_uid`: the module ignores users with a lower uid.
    pub min_uid: u32,
    /// `skip_services`: PAM services that the module ignores, separated by commas.
    pub skip_services: Vec<String>,
    /// `allow`: variables that the module sets, separated by commas; an `*` is any end.
    ///
    /// Without it, all that [`gpusession_login::variables::check`] accepts.
    pub allow: Vec<String>,
    /// `environment`: root's file of variables.
    pub environment: PathBuf,
    /// `socket`: where the daemon listens.
    pub socket: PathBuf,
    /// `debug`: logs why a login session was not bound, or has no variables.
    pub debug: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_millis(500),
            min_uid: 1000,
            skip_services: vec!["systemd-user".into(), "gdm-launch-environment".into()],
            allow: vec!["*".into()],
            environment: gpusession_login::variables::PATH.into(),
            socket: "/run/gpusession/pam.sock".into(),
            debug: false,
        }
    }
}

impl Options {
    /// Parses the arguments; an unknown or bad one is ignored, so that the login continues.
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
                "environment" if value.starts_with('/') => options.environment = value.into(),
                "socket" if value.starts_with('/') => options.socket = value.into(),
                "debug" => options.debug = true,
                _ => {}
            }
        }
        options
    }

    /// Returns `true` if the module ignores the service.
    pub fn skips(&self, service: &str) -> bool {
        self.skip_services.iter().any(|s| s == service)
    }

    /// Returns `true` if the module may set the variable.
    pub fn allows(&self, name: &str) -> bool {
        let fits = |pattern: &String| match pattern.strip_suffix('*') {
            Some(begin) => name.starts_with(begin),
            None => name == pattern,
        };
        self.allow.iter().any(fits)
    }
}
