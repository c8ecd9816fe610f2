//! Changes of the configuration while the server runs.

use std::sync::Arc;

use tracing::{info, warn};

use super::{Pool, locked};
use crate::config::{self, Config, Origin, is_live};
use crate::lease::Lease;
use crate::refusal::Refusal;
use crate::store;

impl Pool {
    /// Applies a changed configuration as far as possible without a restart.
    ///
    /// Returns the changed keys that apply now, and the ones that need a restart.
    pub async fn reload(&self, fresh: Config) -> (Vec<String>, Vec<String>) {
        let old = self.config();
        let line = |(key, value, _): &(String, String, _)| format!("{key} = {value}");
        let before: Vec<String> = old.report.iter().map(line).collect();
        let after: Vec<String> = fresh.report.iter().map(line).collect();
        let key = |line: &String| line.split(" = ").next().unwrap_or_default().to_string();
        let mut changed: Vec<String> = after.iter().filter(|l| !before.contains(l)).cloned().collect();
        let gone = |l: &&String| !after.iter().any(|a| key(a) == key(l));
        changed.extend(before.iter().filter(gone).map(|l| format!("{} is no longer set", key(l))));
        let now = |l: &String| is_live(key(l).trim_end_matches(" is no longer set"));
        let (holds, waits): (Vec<_>, Vec<_>) = changed.into_iter().partition(now);
        let config = old.with_live_of(fresh);
        self.registry.set_rules(config.rules.clone()).await;
        self.supervisor.set_stock(config.warm_workers, config.worker_idle_exit);
        self.supervisor.set_all_limits(config.limits.clone());
        *locked(&self.config) = Arc::new(config);
        for standing in self.registry.leases().await {
            let Lease { id, client, user, .. } = &standing.lease;
            self.supervisor.set_limits(id, self.limits_of(client, user));
        }
        (holds, waits)
    }

    /// Reads the configuration files again. An error leaves the configuration as it is.
    pub async fn read_again(&self) -> Result<(Vec<String>, Vec<String>), Refusal> {
        let fresh = self.load().map_err(|e| Refusal {
            code: "configuration".into(),
            message: e.to_string(),
            hint: "the running configuration stays as it was".into(),
        })?;
        let warnings = fresh.warnings.clone();
        let (holds, waits) = self.reload(fresh).await;
        for line in &warnings {
            warn!("configuration: {line}");
        }
        for line in &holds {
            info!("configuration: {line}");
        }
        for line in &waits {
            warn!("configuration: {line}: takes effect after a restart");
        }
        Ok((holds, waits))
    }

    fn load(&self) -> Result<Config, config::ConfigError> {
        let config = self.config();
        // A missing file that existed at the start would reset every key to its default.
        config::load_here(&config.file, config.file_found)
    }

    /// Writes a key into the drop-in file for changes at run time, and applies it; both or neither.
    pub async fn set_key(
        &self,
        key: &str,
        value: Option<&str>,
    ) -> Result<(Vec<String>, Vec<String>), Refusal> {
        let path = config::runtime_file(&self.facts.config.file);
        let before = match std::fs::read_to_string(&path) {
            Ok(text) => Some(text),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(Refusal::new("failed", format!("{}: {e}", path.display()))),
        };
        let parts = config::key_parts(key).map_err(|m| Refusal::new("usage", m))?;
        if !is_live(&parts.join(".")) || parts[0] == "reserve" {
            return Err(Refusal {
                code: "needs-restart".into(),
                message: format!("{key} cannot be changed while the server runs"),
                hint: format!("write it into {} and restart", self.facts.config.file.display()),
            });
        }
        let text = config::edit_runtime(before.as_deref().unwrap_or_default(), key, value)
            .map_err(|m| Refusal::new("usage", m))?;
        let failed = |e: &dyn std::fmt::Display| Refusal::new("failed", e.to_string());
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|e| failed(&format!("{}: {e}", folder.display())))?;
        }
        store::write_bytes(&path, text.as_bytes(), 0o640).map_err(|e| failed(&e))?;
        // Not applied yet: another file may overrule the drop-in.
        let overruled =
            self.load().ok().filter(|_| value.is_some()).and_then(|fresh| match fresh.origin(key) {
                Origin::Default => None,
                Origin::File(file, _) if file == path => None,
                origin => Some(Refusal {
                    code: "failed".into(),
                    message: format!("{origin} sets {key}, and is read after {}", path.display()),
                    hint: "change it there, and `systemctl reload gpuserver`".into(),
                }),
            });
        let outcome = match overruled {
            Some(refusal) => Err(refusal),
            None => self.read_again().await,
        };
        match outcome {
            Ok(changed) => Ok(changed),
            Err(refusal) => {
                let restored = match before {
                    Some(before) => {
                        store::write_bytes(&path, before.as_bytes(), 0o640).map_err(|e| failed(&e))
                    }
                    None => std::fs::remove_file(&path).map_err(|e| failed(&e)),
                };
                restored.and(Err(refusal))
            }
        }
    }
}
