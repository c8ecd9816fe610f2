//! Checks of a request: its own values, and the limits of its client and user.

use super::placement::wanted;
use super::{AllocateError, Gpu, Memory, OnIdle, Request, Table};
use crate::limits::{Bound, Entry, Exceeded, Scope};

impl Table {
    /// Lists the leases that a limit counts, each by its GPUs and whether it is persistent.
    ///
    /// These are the client's, or its user's on this client or on the whole site, and those of the
    /// requests `ahead`.
    fn counted<'a>(
        &'a self,
        request: &'a Request,
        entry: &Entry,
        ahead: &'a [&Request],
    ) -> impl Iterator<Item = (usize, bool)> {
        let (of_user, site) = (entry.of_user, request.limits.scope == Scope::Site);
        let counts = move |client: &str, user: &str| match of_user {
            false => client == request.client,
            true => user == request.user && (site || client == request.client),
        };
        let held = self.held.values().map(|h| &h.lease).filter(move |l| counts(&l.client, &l.user));
        let ahead = ahead.iter().filter(move |r| counts(&r.client, &r.user));
        held.map(|l| (l.shares.len(), l.persistent)).chain(ahead.map(|r| (wanted(r), r.persistent)))
    }

    /// Checks the limits that do not depend on a GPU, as if the requests `ahead` had their leases.
    pub(super) fn within_limits(&self, request: &Request, ahead: &[&Request]) -> Result<(), AllocateError> {
        let refuse = |e: Exceeded| Err(AllocateError::Limit(e));
        for asked in [request.on_idle.map_or("", OnIdle::as_str), if request.hold { "hold" } else { "" }] {
            let refused = request.limits.not_listed("on_idle", |allowed| allowed == asked);
            if let Some(entry) = refused.filter(|_| !asked.is_empty()) {
                return refuse(entry.exceeded(format!("{asked:?} asked for"), "leave it out of the lease"));
            }
        }
        for entry in request.limits.all() {
            let Bound::Number(most) = entry.bound else { continue };
            match entry.name {
                "gpus" => {
                    let held: usize = self.counted(request, entry, ahead).map(|(gpus, _)| gpus).sum();
                    let more = wanted(request);
                    if (held + more) as u64 > most {
                        let why = format!("{held} held, {more} more asked for");
                        return refuse(entry.exceeded(why, "release a lease or ask for fewer GPUs"));
                    }
                }
                "max_persistent" if request.persistent => {
                    let held =
                        self.counted(request, entry, ahead).filter(|(_, persistent)| *persistent).count();
                    if held as u64 >= most {
                        let why = format!("{held} leases already are renewed without end");
                        return refuse(entry.exceeded(why, "release one, or ask for one that ends"));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks the limits on a GPU's memory, multiprocessors and model.
    pub(super) fn allowed_on(&self, request: &Request, gpu: &Gpu) -> Result<(), Exceeded> {
        let need = request.memory.of(gpu.offered_bytes());
        for entry in request.limits.entries("memory") {
            if let Bound::Memory(most) = entry.bound
                && need > most.of(gpu.offered_bytes())
            {
                let why = format!("{} MiB of {} asked for", need >> 20, gpu.uuid);
                return Err(entry.exceeded(why, "ask for less memory"));
            }
        }
        let percent = request.percent_of(gpu);
        for entry in request.limits.entries("sm_percent") {
            if let Bound::Number(most) = entry.bound
                && u64::from(percent) > most
            {
                let why = format!("{percent} % of the multiprocessors asked for");
                return Err(entry.exceeded(why, "ask for sm_percent within it"));
            }
        }
        let name = gpu.name.to_lowercase();
        match request.limits.not_listed("models", |m| name.contains(&m.to_lowercase())) {
            Some(entry) => {
                let why = format!("{} is a {}", gpu.uuid, gpu.name);
                Err(entry.exceeded(why, "ask for another model or server"))
            }
            None => Ok(()),
        }
    }

    /// Checks the request itself, and that this server has its GPUs at all.
    pub(super) fn check(&self, request: &Request) -> Result<(), AllocateError> {
        if let Memory::Percent(p) = request.memory
            && !(p > 0.0 && p <= 100.0)
        {
            return Err(AllocateError::Invalid(format!("memory: {p} % is not between 0 and 100")));
        }
        if !(1..=100).contains(&request.sm_percent) {
            let given = request.sm_percent;
            return Err(AllocateError::Invalid(format!("sm_percent: {given} is not between 1 and 100")));
        }
        if request.limits_multiprocessors() && request.kinds() == [None] {
            return Err(AllocateError::Invalid(
                "sm_percent and sm_count need sharing = \"mps\"; ask for that, or leave them out".into(),
            ));
        }
        if request.kinds() == [Some(true)] && !self.gpus.iter().any(Gpu::by_mps) {
            return Err(AllocateError::NeverFits(
                "no GPU of this server is shared by MPS, which sharing = \"mps\", sm_percent and sm_count need; leave them \
                 out, or use another server"
                    .into(),
            ));
        }
        match request.devices.iter().find(|d| self.gpu(d).is_none()) {
            Some(unknown) => Err(AllocateError::NeverFits(format!("this server has no GPU {unknown}"))),
            None => Ok(()),
        }
    }
}
