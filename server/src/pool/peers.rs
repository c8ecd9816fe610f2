//! The pool's other servers, from which this one takes statements.
//!
//! A server only asks. So no caller of its port can give it anything to keep, and each statement
//! that it takes has the signature of the pool's authority.

use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::control::StatementsRequest;
use gpusession_proto::control::statements_client::StatementsClient;
use gpusession_proto::join::{self, is_name};
use gpusession_proto::journal::Event as Said;
use gpusession_proto::statement::MAX_SIGNED;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Code;
use tonic::transport::Channel;
use tracing::{error, info, warn};

use super::contact::Peer;
use super::lock::locked;
use super::state::Pool;
use crate::net::{self, PORT, root_cause};
use crate::signer::member::Member;
use crate::statements::{MAX_STATEMENTS, PAGE};

/// Time that the answers of one server may take together.
const PULL_TIMEOUT: Duration = Duration::from_secs(20);
/// Pause between warnings about one server.
const WARNING_INTERVAL: Duration = Duration::from_secs(3600);
/// Longest answer, in bytes.
const MAX_REPLY: usize = PAGE * (MAX_SIGNED + 16) + 1024;
/// Most answers in a row.
const MAX_PAGES: usize = MAX_STATEMENTS / PAGE + 1;

/// Reason why a server hands over no statements.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("it does not answer: {0}")]
    Silent(String),
    #[error("its gpuserver is of an earlier version without statements: revoke there by hand, and update it")]
    TooOld,
    #[error("it refuses: {0}")]
    Refused(String),
    #[error("its answer is not one of a server of this pool: {0}")]
    Malformed(String),
    #[error("some of its statements are left out: {0}")]
    LeftOut(String),
}

/// Progress with one server.
#[derive(Default)]
struct Progress {
    server: String,
    run: Vec<u8>,
    after: u64,
    left_out: String,
}

impl Pool {
    /// Takes statements from the servers in `peers`, again and again. Never returns.
    pub async fn follow_peers(self: Arc<Self>) {
        loop {
            self.keep_membership().await;
            self.ask_peers().await;
            if let Err(e) = self.state_again().await {
                error!("statements: the present authority has not signed all of them: {e}; trying again");
            }
            self.revoke_their_tokens().await;
            tokio::time::sleep(self.config().peer_interval).await;
        }
    }

    /// Returns the addresses in `peers`, and those of the issuers of a server without the key.
    fn peer_addresses(&self) -> Vec<String> {
        let config = self.config();
        let port = |port: Option<u16>| port.unwrap_or(PORT);
        let mut all: Vec<_> = config.peers.iter().map(|a| net::host_port(&a.host, port(a.port))).collect();
        let issuers = self.signer.link().member().map(Member::addresses).unwrap_or_default();
        for address in issuers {
            if !all.contains(&address) {
                all.push(address);
            }
        }
        all
    }

    /// Takes the authorities from the issuers, and renews this server's certificates, if it is a
    /// server without the authority's key.
    async fn keep_membership(self: &Arc<Self>) {
        let Some(report) = self.signer.link().member().map(|member| self.report(member)) else { return };
        let (peers, certificate, unix) = (self.peer_addresses(), self.certificate.clone(), self.unix());
        let kept = self.signer.aside(move |signer| {
            let changed = signer.refresh(peers, report)?;
            Ok((changed, certificate.keep(unix)))
        });
        match kept.await {
            Ok((changed, kept)) => {
                self.note_renewal(kept);
                if changed {
                    self.follow_rotation().await;
                }
            }
            Err(e) => error!("the pool's authorities: not taken from an issuer: {e}; trying again"),
        }
    }

    /// Asks each server once, all at the same time.
    async fn ask_peers(self: &Arc<Self>) {
        let addresses = self.peer_addresses();
        let asked: Vec<Peer> = {
            let mut peers = locked(&self.peers);
            let known = |address: String| {
                let known = peers.iter().find(|peer| peer.address == address).cloned();
                known.unwrap_or_else(|| Peer { address, ..Peer::default() })
            };
            *peers = addresses.into_iter().map(known).collect();
            peers.clone()
        };
        let mut asking = JoinSet::new();
        for peer in asked {
            let pool = self.clone();
            asking.spawn(async move {
                let Peer { run, after, left_out, .. } = peer;
                let mut progress = Progress { run, after, left_out, ..Progress::default() };
                let pulled = timeout(PULL_TIMEOUT, pool.pull(&peer.address, &mut progress)).await;
                let pulled = pulled.unwrap_or_else(|_| Err(Trouble::Silent("within 20 s".into())));
                pool.note_contact(&peer.address, progress, pulled);
            });
        }
        while asking.join_next().await.is_some() {}
    }

    /// Takes all statements that a server has and this one has not.
    async fn pull(self: &Arc<Self>, address: &str, progress: &mut Progress) -> Result<(), Trouble> {
        let mut client =
            StatementsClient::new(self.connect(address).await?).max_decoding_message_size(MAX_REPLY);
        let mut foreign = 0;
        for _ in 0..MAX_PAGES {
            let request = StatementsRequest { run: progress.run.clone(), after: progress.after };
            let reply = client.after(request).await.map_err(|status| match status.code() {
                Code::Unimplemented => Trouble::TooOld,
                Code::PermissionDenied | Code::Unauthenticated | Code::ResourceExhausted => {
                    Trouble::Refused(status.message().into())
                }
                Code::OutOfRange => Trouble::Malformed(status.message().into()),
                _ => Trouble::Silent(root_cause(&status)),
            })?;
            let reply = reply.into_inner();
            if !is_name(&reply.server) || reply.run.len() != 16 || reply.statements.len() > PAGE {
                return Err(Trouble::Malformed("a field is out of its bounds".into()));
            }
            progress.server.clone_from(&reply.server);
            let stuck = reply.run == progress.run && reply.last <= progress.after;
            let from = format!("server {} at {address}", reply.server);
            let taken = self.take(reply.statements, &from).await;
            let taken = taken.map_err(|e| Trouble::Refused(format!("this server cannot store them: {e}")))?;
            foreign += taken.foreign;
            if reply.run != progress.run {
                progress.left_out.clear();
            }
            if let Some(why) = taken.left_out {
                progress.left_out = why.to_string();
            }
            progress.run = reply.run;
            progress.after = reply.last;
            if !reply.more {
                let whole = progress.left_out.is_empty();
                return if whole { Ok(()) } else { Err(Trouble::LeftOut(progress.left_out.clone())) };
            }
            if stuck || foreign > PAGE {
                return Err(Trouble::Malformed("its list does not end".into()));
            }
        }
        Err(Trouble::Malformed("its list does not end".into()))
    }

    /// Connects to a server of the pool, with this server's certificate.
    async fn connect(&self, address: &str) -> Result<Channel, Trouble> {
        let authorities = self.signer.present().certificates();
        let credentials = (authorities.as_str(), self.certificate.identity());
        net::connect(address, join::any_server(), credentials, PULL_TIMEOUT).await.map_err(Trouble::Silent)
    }

    /// Notes the outcome of a try; warns at the first failure, and then at intervals.
    fn note_contact(&self, address: &str, progress: Progress, pulled: Result<(), Trouble>) {
        let (now, unix) = (self.clock.now(), self.clock.unix());
        let mut peers = locked(&self.peers);
        let Some(peer) = peers.iter_mut().find(|peer| peer.address == address) else { return };
        if !progress.server.is_empty() {
            peer.server = progress.server;
        }
        (peer.run, peer.after, peer.left_out) = (progress.run, progress.after, progress.left_out);
        if matches!(pulled, Ok(()) | Err(Trouble::LeftOut(_))) {
            (peer.contact, peer.contact_unix) = (Some(now), Some(unix));
        }
        match pulled {
            Ok(()) => {
                if peer.warned.take().is_some() {
                    info!("peer {address}: answers again; this server has its statements");
                }
                peer.trouble.clear();
            }
            Err(trouble) => {
                if matches!(trouble, Trouble::Malformed(_)) {
                    // It may have sent anything: begin again next time.
                    (peer.run, peer.after) = (Vec::new(), 0);
                }
                peer.trouble = trouble.to_string();
                if peer.warned.is_none_or(|at| now >= at + WARNING_INTERVAL) {
                    peer.warned = Some(now);
                    warn!(
                        message_id = Said::PeerSilent.id(),
                        gpusession_server = address,
                        gpusession_reason = peer.trouble,
                        "peer {address}: {trouble}; revocations that it knows may not hold here"
                    );
                }
            }
        }
    }

    /// Returns why no issuer answers a server without the authority's key, if none does.
    pub fn issuers_trouble(&self) -> Option<String> {
        self.signer.link().member().map(Member::trouble).filter(|trouble| !trouble.is_empty())
    }

    /// Lists the servers in `peers`, with the latest contact.
    pub fn peers(&self) -> Vec<Peer> {
        locked(&self.peers).clone()
    }
}
