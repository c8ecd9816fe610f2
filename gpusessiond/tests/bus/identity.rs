//! Signals about this client's certificate.

use gpusession_test_daemon::settings;
use gpusessiond::bus::{Bus, Parts};
use gpusessiond::renewal::Standing;

use super::super::*;

#[tokio::test]
async fn a_certificate_that_ends_soon_has_a_signal_for_each_warning() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 1));
    let (engine, config) = (engine(&[&sim]), config(&[]));
    let (identity, standing) = tokio::sync::watch::channel(Some(Standing::default()));
    let parts = Parts {
        leases: std::sync::Arc::new(engine.clone()),
        settings: settings(&engine, &config, std::path::Path::new("/nonexistent")),
        sessions: None,
        store: None,
        lease_fds: Default::default(),
        identity: standing,
    };
    let _api = Bus::start(bus.connect().await, parts).await.unwrap();
    let mut stream = signals(&bus.connect().await).await;
    let warn = |warned| {
        identity.send_modify(|standing| {
            let standing = standing.as_mut().unwrap();
            (standing.facts.expires_unix, standing.warned) = (7, warned);
        });
    };
    warn(None);
    warn(Some(1));
    next_signals(&mut stream, "IdentityExpiring").await;
    // The same warning once more, and a renewal in between: one signal.
    warn(Some(1));
    warn(None);
    warn(Some(2));
    let message = async {
        loop {
            let message = stream.next().await.unwrap().unwrap();
            if message.header().member().is_some_and(|member| member == "IdentityExpiring") {
                return message;
            }
        }
    };
    let message = tokio::time::timeout(TEST_TIMEOUT, message).await.unwrap();
    assert_eq!(message.body().deserialize::<u64>().unwrap(), 7_000_000);
}
