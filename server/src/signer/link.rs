//! The server's and the command line's way to the signer: a socket, or a keeper in this process.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpusession_proto::control::ServerReport;
use gpusession_proto::join::{FleetKey, JoinToken, ServerToken};
use gpusession_proto::message;
use gpusession_proto::statement::{Signed, Statement};
use nix::sys::socket::{getsockopt, sockopt};

use super::authorities::Present;
use super::ca::{AuthorityError, Issued};
use super::checkpoints::Checkpoints;
use super::keeper::{Caller, Keeper, Places};
use super::lock::locked;
use super::member::{self, Member};
use super::operation::{Done, Operation, Outcome, Privileged, Refused, Step, UNREAD, USER, Why};
use super::tokens::{Terms, TokenFacts, Tokens};
use crate::checkpoint::{Checkpoint, Place, Verifier};
use crate::clock::{SystemClock, SystemRandom};
use crate::local_service::receive;
use crate::store::{self, Lock};

/// Longest time for a connection, an operation and its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// A way to the signer.
#[derive(Debug)]
pub enum Link {
    /// The keeper in this process; the lock of its folder, unless the caller has it.
    Here(Box<Keeper>, Option<Lock>),
    /// Socket of the signer's own process.
    Socket(PathBuf),
    /// The signer of a server without the authority's key, and its way to the pool's issuers.
    Member(Box<Link>, Box<Member>),
}

/// Returns the folder of the signer whose socket is at `socket`.
///
/// systemd gives the signer's unit folders of one name below `/run` and `/var/lib`.
pub fn folder_of(socket: &Path) -> Option<PathBuf> {
    Some(Path::new("/var/lib").join(socket.parent()?.strip_prefix("/run").ok()?))
}

/// Returns the signer's files: those of its own process, or those inside the state directory.
pub fn places(signer: Option<&Path>, state_dir: &Path) -> Places {
    match signer.and_then(folder_of) {
        Some(folder) => Places::own(&folder),
        None => Places::inside(state_dir),
    }
}

/// Returns the unit of the signer whose socket is at `socket`, without the type's suffix.
pub fn unit_of(socket: &Path) -> String {
    let folder = socket.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    let folder = folder.unwrap_or("gpuserver-ca");
    folder.strip_prefix("gpuserver-ca-").map_or_else(|| folder.into(), |name| format!("gpuserver-ca@{name}"))
}

impl Link {
    /// Returns the server's link. `signer`: socket of the signer's own process.
    ///
    /// Without a socket, the caller holds the lock of the state directory.
    pub fn of_server(signer: Option<&Path>, state_dir: &Path, name: &str) -> Result<Self, Refused> {
        let link = Self::own_of_server(signer, state_dir, name)?.or_member(state_dir)?;
        match link.member().map(Member::name).filter(|of_member| of_member != name) {
            Some(of_member) => {
                let text = format!(
                    "name: the pool admitted this server as {of_member}, and not as {name}: set `name` back, or run \
                     `gpuserver pool join` with a token for {name}"
                );
                Err(Refused::new(Why::Missing, text))
            }
            None => Ok(link),
        }
    }

    /// Returns the server's link to its own signer.
    fn own_of_server(signer: Option<&Path>, state_dir: &Path, name: &str) -> Result<Self, Refused> {
        if let Some(socket) = signer {
            return Ok(Self::Socket(socket.into()));
        }
        let link = Self::here(Places::inside(state_dir), None)?;
        link.ask(Operation::Name(name.into()))?;
        Ok(link)
    }

    fn or_member(self, state_dir: &Path) -> Result<Self, Refused> {
        Ok(match Member::open(state_dir)? {
            Some(member) => Self::Member(Box::new(self), Box::new(member)),
            None => self,
        })
    }

    /// Returns the membership of a server without the authority's key.
    pub fn member(&self) -> Option<&Member> {
        match self {
            Self::Member(_, member) => Some(member),
            Self::Here(..) | Self::Socket(_) => None,
        }
    }

    /// Returns the refusal of this server if it holds no authority's key.
    pub fn issues(&self) -> Result<(), Refused> {
        self.member().map_or(Ok(()), |member| Err(member.no_issuer()))
    }

    /// Returns the link of a command on this host.
    ///
    /// Where no signer listens yet, as after an installation, root opens its files.
    pub fn of_command(signer: Option<&Path>, state_dir: &Path, name: &str) -> Result<Self, Refused> {
        let own = Self::own_of_command(signer, state_dir, name)?;
        // Another user may not read the folder, and gets the signer's refusal.
        let denied = |e: io::Error| e.kind() == io::ErrorKind::PermissionDenied;
        match std::fs::File::open(member::file(state_dir)).is_err_and(denied) {
            true => Ok(own),
            false => own.or_member(state_dir),
        }
    }

    /// Returns the link of a command to the signer of this host.
    pub fn own_of_command(signer: Option<&Path>, state_dir: &Path, name: &str) -> Result<Self, Refused> {
        let Some(socket) = signer else { return Self::own_of_server(None, state_dir, name) };
        let silent = matches!(
            UnixStream::connect(socket).map_err(|e| e.kind()),
            Err(io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
        );
        match folder_of(socket).filter(|_| silent && nix::unistd::geteuid().is_root()) {
            Some(folder) => {
                let lock = store::lock(&folder)?;
                give_to_signer(&folder)?;
                Self::here(Places::own(&folder), Some(lock))
            }
            None => Ok(Self::Socket(socket.into())),
        }
    }

    fn here(places: Places, lock: Option<Lock>) -> Result<Self, Refused> {
        let keeper = Keeper::open(places, Arc::new(SystemClock), Arc::new(SystemRandom))?;
        Ok(Self::Here(Box::new(keeper), lock))
    }

    /// Has the signer do an operation.
    pub fn ask(&self, operation: Operation) -> Outcome {
        match self {
            Self::Here(keeper, _) => keeper.perform(Caller::Root, operation),
            Self::Socket(path) => ask_any(path, &operation).unwrap_or_else(|e| Err(away(path, &e))),
            Self::Member(own, member) => ask_member(own, member, operation),
        }
    }

    /// Lists the join tokens, the newest last.
    pub fn tokens(&self) -> Result<Vec<TokenFacts>, Refused> {
        let mut all: Vec<TokenFacts> = Vec::new();
        loop {
            let after = all.last().map(|last| last.id.clone()).unwrap_or_default();
            match self.ask(Operation::Tokens { after })? {
                Done::Tokens(more) if more.is_empty() => break,
                Done::Tokens(more) => all.extend(more),
                other => return Err(unexpected(&other)),
            }
        }
        all.sort_by_key(|token| token.created_unix);
        Ok(all)
    }

    /// Returns the present authorities.
    pub fn present(&self) -> Result<Present, Refused> {
        match self.ask(Operation::Present)? {
            Done::Present(described) => Ok(described.try_into()?),
            other => Err(unexpected(&other)),
        }
    }

    /// Makes a token with which a server of this name joins the pool.
    pub fn admit_server(&self, admit: Privileged) -> Result<(ServerToken, TokenFacts), Refused> {
        let (token, facts) = self.new_token(Operation::Privileged(admit))?;
        Ok((ServerToken(token), facts))
    }

    /// Describes the authorities to servers that hold no key, as [`super::bundle`] encodes them.
    pub fn bundle(&self) -> Result<Vec<u8>, Refused> {
        match self.ask(Operation::Bundle)? {
            Done::Bundle(bundle) => Ok(bundle),
            other => Err(unexpected(&other)),
        }
    }

    /// Creates a join token.
    pub fn create_token(&self, terms: Terms) -> Result<(JoinToken, TokenFacts), Refused> {
        self.new_token(Operation::TokenCreate(terms))
    }

    /// Creates a fleet key.
    pub fn create_fleet(&self, terms: Terms) -> Result<(FleetKey, TokenFacts), Refused> {
        let pattern = terms.pattern.clone();
        let (of_tokens, facts) = self.new_token(Operation::FleetCreate(terms))?;
        Ok((FleetKey { of_tokens, pattern }, facts))
    }

    fn new_token(&self, operation: Operation) -> Result<(JoinToken, TokenFacts), Refused> {
        match self.ask(operation)? {
            Done::Token { id, secret, authority, facts } => Ok((JoinToken { authority, id, secret }, facts)),
            other => Err(unexpected(&other)),
        }
    }

    /// Revokes the join token whose id begins with `id`; returns the whole id, if one token fits.
    pub fn revoke_token(&self, id: &str) -> Result<Option<String>, Refused> {
        match self.ask(Operation::TokenRevoke { id: id.into() })? {
            Done::Revoked(revoked) => Ok(revoked),
            other => Err(unexpected(&other)),
        }
    }

    /// Has a certificate signed.
    pub fn sign(&self, operation: Operation) -> Result<Issued, Refused> {
        match self.ask(operation)? {
            Done::Issued(issued) => Ok(issued),
            other => Err(unexpected(&other)),
        }
    }

    /// Has statements signed.
    pub fn state(&self, operation: Operation) -> Result<Vec<(Signed, Statement)>, Refused> {
        match self.ask(operation)? {
            Done::Stated(stated) => stated
                .iter()
                .map(|bytes| Signed::read(bytes).map_err(|e| Refused::new(Why::Failed, e.to_string())))
                .collect(),
            other => Err(unexpected(&other)),
        }
    }

    /// Has a place in the audit trail signed.
    pub fn checkpoint(&self, place: Place) -> Result<Checkpoint, Refused> {
        match self.ask(Operation::Checkpoint(place))? {
            Done::Checkpoint(checkpoint) => Ok(checkpoint),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns how to verify the audit trail, also beside a running server with its own signer.
    pub fn verifier_of(signer: Option<&Path>, state_dir: &Path, name: &str) -> Result<Verifier, Refused> {
        if signer.is_some() {
            return Self::of_command(signer, state_dir, name)?.verifier();
        }
        let [key, latest] = Places::inside(state_dir).checkpoints;
        let failed = |e: io::Error| Refused::new(Why::Failed, format!("{}: {e}", key.display()));
        Ok(Checkpoints::open(&key, &latest).map_err(failed)?.verifier())
    }

    fn verifier(&self) -> Result<Verifier, Refused> {
        match self.ask(Operation::Verifier)? {
            Done::Verifier(verifier) => Ok(verifier),
            other => Err(unexpected(&other)),
        }
    }

    /// Permits the running server an operation that the signer does for root alone.
    ///
    /// A server whose signer is inside its process needs no permission, and one of an earlier
    /// version asks no signer.
    pub fn permit(signer: Option<&Path>, operation: Privileged) -> Result<(), Refused> {
        let Some(socket) = signer else { return Ok(()) };
        match Self::Socket(socket.into()).ask(Operation::Permit(operation)) {
            Err(refused) if refused.why != Why::Away => Err(refused),
            _ => Ok(()),
        }
    }
}

/// Gives a folder that root made to the signer's user.
fn give_to_signer(folder: &Path) -> Result<(), Refused> {
    use std::os::unix::fs::PermissionsExt;
    let user = nix::unistd::User::from_name(USER).ok().flatten();
    let user = user.ok_or_else(|| {
        let text = format!("the user {0} does not exist: systemd-sysusers gpuserver.conf creates it", USER);
        Refused::new(Why::Failed, text)
    })?;
    let failed = |e: io::Error| Refused::new(Why::Failed, format!("{}: {e}", folder.display()));
    for path in [folder.to_path_buf(), folder.join("lock")] {
        nix::unistd::chown(&path, Some(user.uid), Some(user.gid)).map_err(|e| failed(e.into()))?;
    }
    // Everyone may read the authority's certificate.
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o711)).map_err(failed)
}

fn unexpected(done: &Done) -> Refused {
    // The variant alone: its content may be secret.
    let text = format!("the signer answered another question ({:?})", std::mem::discriminant(done));
    Refused::new(Why::Failed, text)
}

fn away(socket: &Path, e: &io::Error) -> Refused {
    let (socket, unit) = (socket.display(), unit_of(socket));
    let text = format!("authority: the signer does not answer at {socket}: {e}; systemctl status {unit}");
    Refused::new(Why::Away, text)
}

/// Asks in the earlier form if the signer is of the release before.
fn ask_any(path: &Path, operation: &Operation) -> io::Result<Outcome> {
    let outcome = ask(path, operation)?;
    let unread = |refused: &Refused| refused.why == Why::Request && refused.text.starts_with(UNREAD);
    if !outcome.as_ref().is_err_and(unread) {
        return Ok(outcome);
    }
    let restart = || {
        let text = "the signer is of an earlier release, which lacks this; restart gpuserver-ca.service";
        Err(Refused::new(Why::Request, text))
    };
    Ok(match operation.earlier() {
        Some(earlier) => ask(path, &earlier)?.map(Done::present),
        None => restart(),
    })
}

/// Does an operation for a server without the key: alone, by its own signer, or by an issuer.
fn ask_member(own: &Link, member: &Member, operation: Operation) -> Outcome {
    match operation {
        Operation::Present => Ok(Done::Present(member.described())),
        Operation::Name(_) | Operation::Checkpoint(_) | Operation::Verifier | Operation::GiveUp => {
            own.ask(operation)
        }
        Operation::Server { csr_pem, authority, .. } => member.renew(&csr_pem, authority),
        Operation::Check { .. }
        | Operation::Join { .. }
        | Operation::RenewProven { .. }
        | Operation::StateAgain { .. } => member.forward(&operation),
        Operation::State { verdict, turn } => member.state(&verdict, turn),
        Operation::Renew { .. } => Err(member.unproven()),
        Operation::Init { .. } | Operation::Import { .. } | Operation::Adopt { .. } => Err(member.has_pool()),
        _ => Err(member.no_issuer()),
    }
}

/// Refuses a socket of another user to root, whose operations may carry keys.
///
/// systemd listens for the signer, as root.
fn of_signer(socket: &UnixStream) -> io::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    let listener = getsockopt(socket, sockopt::PeerCredentials)?.uid();
    let signer = || nix::unistd::User::from_name(USER).ok().flatten().map(|user| user.uid.as_raw());
    match listener == 0 || Some(listener) == signer() {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "uid {listener} listens there instead of the signer; check the key `signer`"
        ))),
    }
}

fn ask(path: &Path, operation: &Operation) -> io::Result<Outcome> {
    let bytes = message::encode(operation);
    message::body_len([bytes[0], bytes[1], bytes[2], bytes[3]]).map_err(io::Error::other)?;
    let mut socket = UnixStream::connect(path)?;
    of_signer(&socket)?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    socket.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    // A signer that refuses the caller may answer before it reads.
    let sent = socket.write_all(&bytes);
    receive(&mut socket).map_err(|e| sent.err().unwrap_or(e))
}

/// The server's handle of the signer, with the authorities of the last look.
pub struct Signer {
    link: Link,
    present: Mutex<Arc<Present>>,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Signer({:?})", self.link)
    }
}

impl Signer {
    /// Asks the signer for the authorities.
    pub fn open(link: Link) -> Result<Self, Refused> {
        let present = Mutex::new(Arc::new(link.present()?));
        Ok(Self { link, present })
    }

    /// Returns the way to the signer.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Returns the present authorities.
    pub fn present(&self) -> Arc<Present> {
        locked(&self.present).clone()
    }

    /// Reports to the issuers, and asks them for the present authorities.
    ///
    /// Returns `true` if they have changed.
    pub fn refresh(&self, peers: Vec<String>, report: ServerReport) -> Result<bool, Refused> {
        let Some(member) = self.link.member() else { return Ok(false) };
        let changed = member.refresh(peers, report)?;
        if changed {
            *locked(&self.present) = Arc::new(self.link.present()?);
        }
        Ok(changed)
    }

    /// Takes a step of a rotation; returns `false` if it was taken before.
    pub fn rotate(&self, step: Step) -> Result<bool, Refused> {
        let changed = match self.link.ask(Operation::Privileged(Privileged::Rotate(step)))? {
            Done::Changed(changed) => changed,
            other => return Err(unexpected(&other)),
        };
        *locked(&self.present) = Arc::new(self.link.present()?);
        Ok(changed)
    }

    /// Has the signer work in a thread where it may wait.
    pub async fn aside<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, Refused> + Send + 'static,
    ) -> Result<T, Refused> {
        let signer = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&signer)).await;
        done.unwrap_or_else(|e| Err(Refused::new(Why::Failed, format!("internal error: {e}"))))
    }
}

/// Reads join tokens of a state directory without a server.
pub(super) fn read_tokens(file: &Path) -> Result<Tokens, AuthorityError> {
    Ok(store::read(file)?)
}
