//! Revocations that hold on each server of the pool: made here, or taken from another server.

use std::sync::Arc;

use gpusession_proto::control::pool_event::Event as PoolEventKind;
use gpusession_proto::control::{self as wire, PoolEvent};
use gpusession_proto::journal::Event as Said;
use gpusession_proto::statement::{Signed, Statement, Verdict};
use tracing::{error, info, warn};

use super::administrators::Administrators;
use super::lock::locked;
use super::state::Pool;
use crate::audit;
use crate::signer::link::Link;
use crate::signer::{Operation, Privileged, RESTATED, Refused, Why};
use crate::statements::{Statements, Taken};
use crate::store::{self, StoreError};

/// Most statements about servers that a client gets.
const MAX_SHOWN: usize = 256;

/// Reason why a statement was not made or not taken.
#[derive(Debug, thiserror::Error)]
pub enum NotStated {
    /// The signer refused it.
    #[error(transparent)]
    Signer(#[from] Refused),
    /// A file cannot be written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The statement is not one of this pool.
    #[error("a statement was altered, or no present authority of this pool has signed it")]
    Foreign,
    /// There are too many.
    #[error(
        "the pool has too many statements of server {0}, which may have been taken over: `gpuserver statements list` \
         shows them"
    )]
    Full(String),
}

/// Has the signer make a statement.
pub fn sign(link: &Link, verdict: Verdict, turn: u32) -> Result<(Signed, Statement), Refused> {
    let order = match verdict {
        Verdict::RevokeServer { name } => Operation::Privileged(Privileged::RevokeServer { name }),
        verdict => Operation::State { verdict, turn },
    };
    let made = link.state(order)?.pop();
    made.ok_or_else(|| Refused::new(Why::Failed, "internal error: the signer made no statement"))
}

/// Number of statements that were new, and the reason for which others were left out.
#[derive(Debug, Default)]
pub struct Batch {
    /// Number of new statements.
    pub new: usize,
    /// Number of statements that are not of this pool.
    pub foreign: usize,
    /// Reason for which some were not taken.
    pub left_out: Option<NotStated>,
}

impl Pool {
    /// Returns the pool's statements to `look`.
    pub fn statements<T>(&self, look: impl FnOnce(&Statements) -> T) -> T {
        look(&locked(&self.statements))
    }

    /// Returns the statements that revoke servers, for clients.
    pub(super) fn revoked_servers(&self) -> Vec<Vec<u8>> {
        self.statements(|all| all.servers().take(MAX_SHOWN).map(|kept| kept.signed.bytes()).collect())
    }

    /// Has the signer make a statement, stores it, and applies it.
    pub async fn declare(self: &Arc<Self>, verdict: Verdict) -> Result<Statement, NotStated> {
        let turn = self.statements(|all| all.next_turn(&verdict));
        let made = self.signer.aside(move |signer| sign(signer.link(), verdict, turn));
        let (signed, statement) = made.await?;
        self.log(&statement, "made");
        let made = statement.clone();
        let batch = self.accept(vec![(signed, statement)]).await?;
        batch.left_out.map_or(Ok(made), Err)
    }

    /// Takes statements of another server or a file, and leaves out those not of this pool.
    pub async fn take(self: &Arc<Self>, offered: Vec<Vec<u8>>, from: &str) -> Result<Batch, StoreError> {
        let (present, count) = (self.signer.present(), offered.len());
        let verify = move || {
            let read = |bytes: Vec<u8>| {
                let (signed, _) = Signed::read(&bytes).ok()?;
                Some((present.stated(&signed)?, signed))
            };
            let verified = offered.into_iter().filter_map(read);
            verified.map(|(statement, signed)| (signed, statement)).collect::<Vec<_>>()
        };
        let verified = tokio::task::spawn_blocking(verify).await.unwrap_or_default();
        let foreign = count - verified.len();
        let mut batch = self.accept(verified).await?;
        batch.foreign = foreign;
        if foreign > 0 {
            batch.left_out.get_or_insert(NotStated::Foreign);
        }
        if batch.new > 0 {
            info!("{} statements about revocations: taken from {from}", batch.new);
        }
        Ok(batch)
    }

    /// Keeps statements whose signatures are good, and applies them.
    async fn accept(self: &Arc<Self>, verified: Vec<(Signed, Statement)>) -> Result<Batch, StoreError> {
        let (new, batch) = self.add(verified);
        // First, so that a server which is killed applies them at its next start.
        let stored = self.store_statements().await;
        // A full disk keeps no client's right alive.
        self.apply(new).await?;
        stored.map(|()| batch)
    }

    /// Adds statements to the set; returns the new ones.
    fn add(&self, verified: Vec<(Signed, Statement)>) -> (Vec<Statement>, Batch) {
        let signer = self.signer.present().signer().fingerprint();
        let (mut new, mut batch) = (Vec::new(), Batch::default());
        let mut all = locked(&self.statements);
        let place = all.place();
        for (signed, statement) in verified {
            match all.take(signed, statement.clone(), Some(&signer)) {
                Taken::New => new.push(statement),
                Taken::Known => {}
                Taken::Full => {
                    batch.left_out.get_or_insert(NotStated::Full(statement.server));
                }
            }
        }
        if all.place() != place {
            self.statement_file.changed();
        }
        batch.new = new.len();
        (new, batch)
    }

    /// Writes the file, if the set has changed since.
    async fn store_statements(&self) -> Result<(), StoreError> {
        self.statement_file.store(|| store::text(&*locked(&self.statements))).await
    }

    /// Applies new statements to clients and administrators.
    async fn apply(self: &Arc<Self>, new: Vec<Statement>) -> Result<(), StoreError> {
        let mut unnamed = Vec::new();
        for statement in new {
            let name = statement.verdict.name().to_owned();
            match &statement.verdict {
                Verdict::RevokeClient { identity, .. } | Verdict::ForgetClient { identity, .. } => {
                    if let Some(why) = self.settle_client(&name) {
                        self.end_client(&name, why).await;
                        self.note_statement(&statement);
                    }
                    let revoked = matches!(statement.verdict, Verdict::RevokeClient { .. });
                    unnamed.extend((identity.is_none() && revoked).then_some(name));
                }
                Verdict::RevokeAdministrator { .. } => {
                    let mut all = locked(&self.administrators);
                    if all.settle(&name, statement.unix) {
                        self.administrator_file.changed();
                        drop(all);
                        self.note_statement(&statement);
                    }
                }
                Verdict::RevokeServer { .. } => {
                    self.note_statement(&statement);
                    // Clients ask for the revoked servers together with the authorities.
                    let event = Some(PoolEventKind::AuthoritiesChanged(wire::AuthoritiesChanged {}));
                    self.watches.tell_all(&PoolEvent { lease: String::new(), event });
                }
            }
        }
        self.store_clients().await?;
        self.store_administrators().await?;
        self.revoke_their_tokens().await;
        for name in unnamed {
            self.name_identity(&name).await;
        }
        Ok(())
    }

    /// Applies the statements about a client; returns why its leases end, if they do.
    fn settle_client(&self, name: &str) -> Option<&'static str> {
        let statements = locked(&self.statements);
        let mut clients = locked(&self.clients);
        clients.refuse(statements.identities());
        let why = clients.settle(name, &statements);
        self.client_file.changed();
        why
    }

    /// Names the identity of a client that a server revoked without knowing it.
    async fn name_identity(self: &Arc<Self>, name: &str) {
        let (turn, identity) = {
            let statements = locked(&self.statements);
            let identity = locked(&self.clients).identity(name).filter(|key| !statements.refuses(key));
            (statements.revocation_turn(name), identity)
        };
        let (Some(turn), Some(identity)) = (turn, identity) else { return };
        let verdict = Verdict::RevokeClient { name: name.into(), identity: Some(identity) };
        // The same turn: a server that frees the name meanwhile is not contradicted.
        let made = self.signer.aside(move |signer| sign(signer.link(), verdict, turn)).await;
        let stored = match made {
            Ok(made) => {
                self.add(vec![made]);
                self.store_statements().await.map_err(NotStated::from)
            }
            Err(refused) => Err(refused.into()),
        };
        self.settle_client(name);
        if let Err(e) = stored {
            warn!("client {name}: its identity is not in the pool's statements: {e}; its name is");
        }
    }

    /// Applies all statements, as at the start: the files of clients may be older.
    pub(super) fn settle_all(&self) {
        let statements = locked(&self.statements).clone();
        locked(&self.clients).refuse(statements.identities());
        for verdict in statements.verdicts() {
            let name = verdict.name();
            match verdict {
                Verdict::RevokeClient { .. } | Verdict::ForgetClient { .. } => {
                    let mut clients = locked(&self.clients);
                    clients.settle(name, &statements);
                    self.client_file.changed();
                }
                Verdict::RevokeAdministrator { .. } => {
                    let unix = statements.administrator(name).unwrap_or(0);
                    locked(&self.administrators).settle(name, unix);
                    self.administrator_file.changed();
                }
                Verdict::RevokeServer { .. } => {}
            }
        }
    }

    /// Has the present authority sign what another one has signed: the pool drops that one later.
    pub(super) async fn state_again(self: &Arc<Self>) -> Result<(), NotStated> {
        loop {
            let signer = self.signer.present().signer().fingerprint();
            let old = self.statements(|all| all.signed_by_others(&signer, RESTATED));
            let signed: Vec<_> = old.iter().map(Signed::bytes).collect();
            if signed.is_empty() {
                return Ok(());
            }
            let again =
                self.signer.aside(move |signer| signer.link().state(Operation::StateAgain { signed }));
            self.accept(again.await?).await?;
            let left = self.statements(|all| all.signed_by_others(&signer, RESTATED));
            if left == old {
                return Err(NotStated::Foreign);
            }
        }
    }

    /// Notes the administrator who made a join token over the network.
    pub async fn made_token(&self, administrator: &str, id: &str) -> Result<(), StoreError> {
        {
            let mut all = locked(&self.administrators);
            all.made_token(administrator, id);
            self.administrator_file.changed();
        }
        self.store_administrators().await
    }

    /// Revokes the join tokens that revoked administrators made.
    pub(super) async fn revoke_their_tokens(&self) {
        let theirs = self.administrators(Administrators::tokens_of_revoked);
        if theirs.is_empty() {
            return;
        }
        for (name, id) in theirs {
            // A token that is used up or expired is unknown by now.
            if let Err(e) = self.revoke_token(&id).await {
                error!("token {id} of administrator {name}, who is revoked: not revoked: {e}; trying again");
                continue;
            }
            info!("token {id}: revoked with administrator {name}, who made it");
            let mut all = locked(&self.administrators);
            all.revoked_token(&name, &id);
            self.administrator_file.changed();
        }
        if let Err(e) = self.store_administrators().await {
            error!("{e}");
        }
    }

    fn log(&self, statement: &Statement, what: &str) {
        let Statement { server, number, verdict, .. } = statement;
        info!(
            message_id = Said::StatementTaken.id(),
            gpusession_server = server,
            gpusession_reason = verdict.as_str(),
            "statement {number} of server {server}: {} {}: {what}",
            verdict.as_str(),
            verdict.name()
        );
    }

    /// Notes a statement that changes what this server accepts.
    fn note_statement(&self, statement: &Statement) {
        let Statement { server, number, verdict, .. } = statement;
        let own = self.facts.config.name == *verdict.name();
        if own && matches!(verdict, Verdict::RevokeServer { .. }) {
            error!(
                "this server is revoked: clients and the pool's other servers refuse it; under another `name` it can \
                 serve again"
            );
        }
        if *server == self.facts.config.name {
            // The verb that made it is in the trail.
            return;
        }
        self.log(statement, "applied");
        let client = matches!(verdict, Verdict::RevokeClient { .. } | Verdict::ForgetClient { .. });
        self.audit.note(audit::Event {
            actor: format!("server {server}"),
            client: if client { verdict.name().to_owned() } else { String::new() },
            detail: format!("{} {}: statement {number}", verdict.as_str(), verdict.name()),
            ..audit::own("statement-taken")
        });
    }
}
