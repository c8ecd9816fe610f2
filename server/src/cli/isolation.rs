//! `gpuserver check-isolation`: whether workers of this host can start isolated.

use serde_json::{Value, json};

use crate::cache::Cache;
use crate::config::Config;
use crate::discovery::{self, find_driver};
use crate::isolation::{self, Verdict};
use crate::spawn::worker_program;
use crate::starter::link::Starter;
use crate::text::Output;

/// Exit status if the server would not start.
const REFUSED: u8 = 2;

/// Tests this host as the start of a server does; returns the exit code.
pub(super) fn check_isolation(out: &mut Output<'_>, config: &Config) -> anyhow::Result<u8> {
    let driver = find_driver(config.driver.as_deref()).map_err(|e| e.placed(config))?;
    let starter = Starter::Here(worker_program());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let verdict = runtime.block_on(async {
        let found = discovery::probe(&starter, &driver).await?;
        let gpus = discovery::choose(&config.gpus, found.devices)?;
        let hidden = [&*config.state_dir, &*Cache::images_of(config)];
        let reach = isolation::reach(config.isolation, config.allow_pageable_access, &gpus);
        Ok((isolation::probe(&hidden, &starter, &driver, &gpus).await, reach))
    });
    let (verdict, reach) = verdict.map_err(|e: discovery::DiscoveryError| e.placed(config))?;
    let (untested, lacking) = match &verdict {
        Verdict::Works(_, untested) => (untested.clone(), None),
        Verdict::Lacks(_) | Verdict::DriverFails(_) => (None, Some(verdict.clone())),
    };
    let decision = isolation::decide(config.isolation, verdict);
    let (decision, reach) = match reach {
        Ok(reach) => (decision, reach),
        Err(why) => (decision.and(Err(why)), None),
    };
    let value = json!({
        "allowed": lacking.is_none(),
        "level": decision.as_ref().map_or("off", |d| d.level.as_str()),
        "lacking": decision.as_ref().map_or("", |d| d.lacking.as_str()),
        "untested": untested,
        "reach": reach,
        "starts": decision.is_ok(),
        "reason": decision.as_ref().err(),
    });
    out.answer("isolation", value, |out, _: Value| {
        match &decision {
            Ok(decision) => writeln!(out, "Workers of this host: {decision}")?,
            Err(why) => writeln!(out, "The server does not start: {why}")?,
        }
        if let Some(reach) = &reach {
            writeln!(out, "{reach}")?;
        }
        if let Some(untested) = &untested {
            writeln!(out, "Not tested with the driver: {untested}")?;
        }
        Ok(())
    })?;
    Ok(if decision.is_ok() { 0 } else { REFUSED })
}
