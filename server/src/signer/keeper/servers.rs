//! Operations for servers that hold no authority's key.

use std::net::IpAddr;

use data_encoding::HEXLOWER;
use gpusession_proto::statement::Verdict;
use ipnet::IpNet;
use tracing::info;

use super::super::authorities::Authorities;
use super::super::bundle::Bundle;
use super::super::ca::{Issued, orders_statement, proves_renewal, requested_key};
use super::super::lock::locked;
use super::super::operation::{Done, Outcome, Refused, Why};
use super::super::tokens::{Terms, TokenKind, Tokens};
use super::{Keeper, a_name, find_authority, no_right, signed};
use crate::certificate::{Role, day};

impl Keeper {
    /// Returns the name of the server that has this certificate.
    pub(super) fn shown_server(&self, present: &[u8]) -> Result<String, Refused> {
        let holder = self.shown(present, Role::Server)?;
        if holder.expired(self.clock.unix()) {
            let text = format!(
                "the certificate of server {0} expired on {1}: run `gpuserver pool admit {0}` on an issuer, and \
                 `gpuserver pool join` on that server",
                holder.name,
                day(holder.expires_unix)
            );
            return Err(Refused::new(Why::Request, text));
        }
        Ok(holder.name)
    }

    /// Signs the first certificate of a server that root has admitted by a token.
    pub(super) fn join_server(
        &self,
        (id, proof): (&[u8; 8], &[u8; 32]),
        (name, csr_pem): (&str, &str),
        from: Option<IpAddr>,
    ) -> Result<Issued, Refused> {
        self.a_new_server(name)?;
        let present = self.present()?;
        let authority = present.signer();
        requested_key(csr_pem)?;
        let check = |tokens: &Tokens| {
            let (authority, unix) = (authority.fingerprint(), self.clock.unix());
            tokens.check_server((id, proof), (name, csr_pem), from, &authority, unix)
        };
        check(&locked(&self.tokens))?;
        self.turn()?;
        self.change_tokens(|tokens| {
            check(tokens)?;
            tokens.consume_server(id);
            Ok(())
        })?;
        let issued = authority.issue_server(name, csr_pem, self.clock.unix(), self.random.as_ref())?;
        signed("server", name, &format!("join with token {}", HEXLOWER.encode(id)), &issued);
        Ok(issued)
    }

    /// Signs the next certificate of a server for the name in its present one, whose key it has.
    pub(super) fn renew_server(
        &self,
        present: &[u8],
        csr_pem: &str,
        authority: &[u8; 32],
        proof: &[u8],
    ) -> Result<Issued, Refused> {
        let name = self.shown_server(present)?;
        if !proves_renewal(present, csr_pem, authority, proof) {
            let text = format!("the request is not signed with the key of the certificate of server {name}");
            return Err(Refused::new(Why::Request, text));
        }
        let all = self.present()?;
        let authority = find_authority(&all, authority)?;
        self.turn()?;
        let issued = authority.issue_server(&name, csr_pem, self.clock.unix(), self.random.as_ref())?;
        signed("server", &name, "renewal", &issued);
        Ok(issued)
    }

    /// Signs a statement with the name of a server whose key has signed the order.
    pub(super) fn state_for(&self, present: &[u8], verdict: Verdict, turn: u32, proof: &[u8]) -> Outcome {
        if matches!(verdict, Verdict::RevokeServer { .. }) {
            return Err(no_right());
        }
        let server = self.shown_server(present)?;
        if !orders_statement(present, &verdict, turn, proof) {
            let text = format!("the order is not signed with the key of the certificate of server {server}");
            return Err(Refused::new(Why::Request, text));
        }
        self.state_as(server, verdict, turn)
    }

    /// Checks a name that another server shall get.
    fn a_new_server(&self, name: &str) -> Result<(), Refused> {
        a_name(name)?;
        if locked(&self.name).as_deref() == Some(name) {
            let text = format!("{name} is this server itself: another server needs another `name`");
            return Err(Refused::new(Why::Request, text));
        }
        Ok(())
    }

    /// Describes the authorities for servers that hold none.
    pub(super) fn bundle(&self) -> Result<Vec<u8>, Refused> {
        let present = self.present()?;
        self.turn()?;
        let (server, unix) = (self.own_name()?, self.clock.unix());
        Ok(Bundle { server, unix, described: present.describe() }.seal(&present)?)
    }

    /// Removes the authorities with their keys, and the tokens that they would sign for.
    ///
    /// A caller whose host lost its power meanwhile asks again.
    pub(super) fn give_up(&self) -> Outcome {
        let mut all = locked(&self.authorities);
        self.change_tokens(|tokens| {
            *tokens = Tokens::default();
            Ok(())
        })?;
        Authorities::remove(&self.places.folder)?;
        *all = None;
        info!("the authorities with their keys, and the join tokens: removed; this server is a member now");
        Ok(Done::Nothing)
    }

    /// Makes a token with which one server of this name joins.
    pub(super) fn admit_server(&self, name: &str, ttl: u64, from: &[IpNet]) -> Outcome {
        self.a_new_server(name)?;
        let terms = Terms { pattern: name.into(), uses: 1, ttl, from: from.to_vec(), per_address: 0 };
        self.create_token(TokenKind::Server, &terms)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gpusession_proto::join::{self, JoinToken, ServerToken};
    use gpusession_proto::statement::Verdict;
    use rcgen::{CertificateParams, KeyPair, SigningKey as _};

    use super::super::tests::{Site, csr, der, issued, open, stated, why};
    use super::*;
    use crate::certificate::{Holder, holder};
    use crate::clock::Clock as _;
    use crate::signer::ca::{SERVER_TTL, order_statement, prove_renewal};
    use crate::signer::{Done, Operation, Privileged, Step};

    fn admitted(site: &Site, name: &str) -> ServerToken {
        let admit = Privileged::AdmitServer { name: name.into(), ttl: 60, from: Vec::new() };
        match site.root(Operation::Privileged(admit)).unwrap() {
            Done::Token { id, secret, authority, .. } => ServerToken(JoinToken { authority, id, secret }),
            other => panic!("{other:?}"),
        }
    }

    fn key() -> (KeyPair, String) {
        let key = KeyPair::generate().unwrap();
        let csr = CertificateParams::new(vec![]).unwrap().serialize_request(&key).unwrap().pem().unwrap();
        (key, csr)
    }

    fn admission(token: &ServerToken, name: &str, csr_pem: &str) -> Operation {
        let (name, csr_pem) = (name.to_owned(), csr_pem.to_owned());
        let proof = token.proof(&name, &csr_pem);
        Operation::JoinServer { id: token.0.id, proof, name, csr_pem, from: None }
    }

    fn whose(der: &[u8]) -> Holder {
        holder(der).unwrap()
    }

    #[test]
    fn a_token_of_root_admits_one_server_of_its_name_and_no_client() {
        let site = Site::new();
        let token = admitted(&site, "gpu2");
        assert_eq!(why(site.server(admission(&token, "gpu3", &csr()))), Why::Token, "another name");
        assert_eq!(why(site.server(admission(&token, "gpu1", &csr()))), Why::Request, "the issuer's own");
        assert_eq!(why(site.server(admission(&token, "gpu2", "garbage"))), Why::Request, "uses up nothing");
        // Neither kind of token serves for the other, and an altered request is no longer proven.
        let as_client = Operation::join(&token.0, "gpu2", None, &csr(), true);
        assert_eq!(why(site.server(as_client)), Why::Token);
        let of_client = ServerToken(site.token("*", 9));
        assert_eq!(why(site.server(admission(&of_client, "gpu2", &csr()))), Why::Token);
        let Operation::JoinServer { id, proof, name, from, .. } = admission(&token, "gpu2", &csr()) else {
            panic!()
        };
        let altered = Operation::JoinServer { id, proof, name, csr_pem: csr(), from };
        assert_eq!(why(site.server(altered)), Why::Token, "a server on the way has the proof alone");

        let late = admitted(&site, "gpu3");
        let holder = whose(&der(&issued(site.server(admission(&token, "gpu2", &csr())))));
        assert_eq!((holder.role, holder.name.as_str()), (Role::Server, "gpu2"));
        assert_eq!(holder.expires_unix, site.clock.unix() + SERVER_TTL.as_secs());
        let site = Site { keeper: open(&site.folder, &site.clock), ..site };
        assert_eq!(
            why(site.server(admission(&token, "gpu2", &csr()))),
            Why::Token,
            "used, also after a restart"
        );
        site.clock.advance(Duration::from_secs(60));
        assert_eq!(why(site.server(admission(&late, "gpu3", &csr()))), Why::Token, "expired");
        let void = admitted(&site, "gpu4");
        for step in [Step::Begin(None), Step::Switch] {
            site.root(Operation::Privileged(Privileged::Rotate(step))).unwrap();
        }
        assert_eq!(why(site.server(admission(&void, "gpu4", &csr()))), Why::Token, "of the old authority");
        let own = Privileged::AdmitServer { name: "gpu1".into(), ttl: 60, from: Vec::new() };
        assert_eq!(why(site.root(Operation::Privileged(own))), Why::Request);
    }

    #[test]
    fn root_permits_the_server_one_token_for_a_server() {
        let site = Site::new();
        let admit = |name: &str| Privileged::AdmitServer { name: name.into(), ttl: 60, from: Vec::new() };
        assert_eq!(why(site.server(Operation::Privileged(admit("gpu2")))), Why::Right);
        site.root(Operation::Permit(admit("gpu2"))).unwrap();
        assert_eq!(why(site.server(Operation::Privileged(admit("gpu3")))), Why::Right);
        assert!(matches!(site.server(Operation::Privileged(admit("gpu2"))), Ok(Done::Token { .. })));
        assert_eq!(why(site.server(Operation::Privileged(admit("gpu2")))), Why::Right, "used up");
        // No operation of the server makes a token for a server otherwise.
        let pattern = site.token("server:gpu2", 1);
        assert_eq!(why(site.server(admission(&ServerToken(pattern), "gpu2", &csr()))), Why::Token);
    }

    #[test]
    fn a_server_renews_its_own_name_with_its_own_key_alone() {
        let (site, other) = (Site::new(), Site::new());
        let authority = site.authority();
        let (first_key, csr_pem) = key();
        let first = der(&issued(site.server(admission(&admitted(&site, "gpu2"), "gpu2", &csr_pem))));
        let renew = |present: &[u8], key: &KeyPair| {
            let csr_pem = csr();
            let proof = prove_renewal(&key.serialize_pem(), &csr_pem, &authority).unwrap();
            Operation::RenewServer { present: present.into(), csr_pem, authority, proof }
        };
        let second = whose(&der(&issued(site.server(renew(&first, &first_key)))));
        assert_eq!((second.role, second.name.as_str()), (Role::Server, "gpu2"));
        // A server that saw the certificate, as an issuer did, has no key for it.
        assert_eq!(why(site.server(renew(&first, &KeyPair::generate().unwrap()))), Why::Request);
        let Operation::RenewServer { present, proof, .. } = renew(&first, &first_key) else { panic!() };
        let altered = Operation::RenewServer { present, csr_pem: csr(), authority, proof };
        assert_eq!(why(site.server(altered)), Why::Request);
        // Certificates of clients, administrators and other pools.
        let (client_key, client_csr) = key();
        let client = Operation::join(&site.token("*", 1), "gpu2", None, &client_csr, true);
        let client = der(&issued(site.server(client)));
        let (alice_key, csr_pem) = key();
        let alice = Privileged::Administrator { name: "gpu2".into(), csr_pem };
        let alice = der(&issued(site.root(Operation::Privileged(alice))));
        let (foreign_key, csr_pem) = key();
        let foreign = der(&issued(other.server(admission(&admitted(&other, "gpu2"), "gpu2", &csr_pem))));
        for (bad, key) in [(client, &client_key), (alice, &alice_key), (foreign, &foreign_key)] {
            assert_eq!(why(site.server(renew(&bad, key))), Why::Request);
        }
        assert_eq!(why(site.server(renew(b"garbage", &first_key))), Why::Request);
        let unknown = Operation::RenewServer {
            present: first.clone(),
            csr_pem: csr(),
            authority: other.authority(),
            proof: Vec::new(),
        };
        assert_eq!(why(site.server(unknown)), Why::Request);
        site.clock.advance(SERVER_TTL);
        assert_eq!(why(site.server(renew(&first, &first_key))), Why::Request, "expired");
    }

    #[test]
    fn statements_for_a_server_have_its_name_and_revoke_no_server() {
        let site = Site::new();
        let (key, csr_pem) = key();
        let present = der(&issued(site.server(admission(&admitted(&site, "gpu2"), "gpu2", &csr_pem))));
        let order = |present: &[u8], key: &KeyPair, verdict: Verdict, turn| {
            let proof = order_statement(&key.serialize_pem(), &verdict, turn).unwrap();
            Operation::StateFor { present: present.into(), verdict, turn, proof }
        };
        let state = |present: &[u8], verdict| site.server(order(present, &key, verdict, 1));
        let forget = || Verdict::ForgetClient { name: "vm-1".into(), identity: None };
        let (_, statement) = stated(state(&present, forget())).remove(0);
        assert_eq!((statement.server.as_str(), statement.number), ("gpu2", 1));
        let own = stated(site.server(Operation::State { verdict: forget(), turn: 2 })).remove(0).1;
        assert_eq!((own.server.as_str(), own.number), ("gpu1", 2));
        // The issuer's process saw the certificate, and has no key for it.
        let stolen = order(&present, &KeyPair::generate().unwrap(), forget(), 1);
        assert_eq!(why(site.server(stolen)), Why::Request);
        let Operation::StateFor { present: of, verdict, proof, .. } = order(&present, &key, forget(), 1)
        else {
            panic!()
        };
        let altered = Operation::StateFor { present: of, verdict, turn: 9, proof };
        assert_eq!(why(site.server(altered)), Why::Request);
        assert_eq!(why(state(&present, Verdict::RevokeServer { name: "gpu3".into() })), Why::Right);
        let (client_key, client_csr) = self::key();
        let client = Operation::join(&site.token("*", 1), "gpu2", None, &client_csr, true);
        let client = der(&issued(site.server(client)));
        assert_eq!(why(site.server(order(&client, &client_key, forget(), 1))), Why::Request);
    }

    #[test]
    fn a_client_that_signs_its_renewal_is_renewed_for_no_other_key() {
        let site = Site::new();
        let authority = site.authority();
        let (key, first) = key();
        let joined = Operation::join(&site.token("*", 1), "vm-1", None, &first, true);
        let present = der(&issued(site.server(joined)));
        let renew = |key: &KeyPair, signed: &str, csr_pem: &str| {
            let proof = key.sign(&join::renewal(signed)).unwrap();
            let (present, csr_pem) = (present.clone(), csr_pem.to_owned());
            Operation::RenewProven { present, csr_pem, authority, proof }
        };
        let (next, other) = (csr(), csr());
        assert_eq!(why(site.server(renew(&key, &next, &other))), Why::Request, "another request");
        let thief = KeyPair::generate().unwrap();
        assert_eq!(why(site.server(renew(&thief, &next, &next))), Why::Request, "another key");
        let second = der(&issued(site.server(renew(&key, &next, &next))));
        assert_eq!(whose(&second).name, "vm-1");
        // From now on no server renews it without the client.
        let unsigned = |present: &[u8]| {
            let csr_pem = csr();
            site.server(Operation::Renew { present: present.into(), csr_pem, authority })
        };
        assert_eq!(why(unsigned(&second)), Why::Request);
        issued(unsigned(&present));
    }
}
