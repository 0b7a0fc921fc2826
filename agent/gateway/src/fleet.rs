//! What the gateway reads out of a FleetView: whom to connect to, and whether requests would be served.
//!
//! Pure: functions of the view and of who is reached.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::{FleetMember, FleetView};
use deepinfer_protocol::{AgentId, Span, Time};

/// How long a lost agent counts as one that comes back or is replaced: longer than the control plane needs to say
/// that a node is lost (its lease of 40 s and the grace of 30 s), after which the view says what is rebuilt.
pub const LOST_GRACE: Span = Span::secs(120);

/// Whom the gateway is connected to, and whom it lost a while ago.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    connected: BTreeSet<AgentId>,
    lost: BTreeMap<AgentId, Time>,
}

impl Reach {
    /// A connection opened.
    pub fn up(&mut self, agent: &AgentId) {
        self.lost.remove(agent);
        self.connected.insert(agent.clone());
    }

    /// A connection ended.
    pub fn down(&mut self, now: Time, agent: &AgentId) {
        if self.connected.remove(agent) {
            self.lost.insert(agent.clone(), now);
        }
    }

    /// Forgets who was lost too long ago; whether that was anybody.
    pub fn expire(&mut self, now: Time) -> bool {
        let before = self.lost.len();
        self.lost.retain(|_, since| now.since(*since) < LOST_GRACE);
        self.lost.len() < before
    }

    /// Whether requests for this agent are worth taking. Of those lost only while others are reached: who has lost
    /// everybody is cut off, and clients do better elsewhere.
    fn counts(&self, agent: &AgentId) -> bool {
        self.connected.contains(agent) || !self.connected.is_empty() && self.lost.contains_key(agent)
    }
}

/// Agents to keep a connection to: all of them, for those that serve no more still run what they have.
pub fn peers(view: &FleetView) -> Vec<(AgentId, SocketAddr)> {
    view.members.iter().map(|member| (member.name.clone(), member.data)).collect()
}

/// Why a request would not be served, now or after a wait that pays; `None` if it would. Prefill and decode must be
/// able to read each other's KV.
pub fn unready_reason(view: &FleetView, reach: &Reach) -> Option<String> {
    if view.generation.0 == 0 && view.members.is_empty() {
        return Some("no fleet view has come yet".to_owned());
    }
    if view.closed {
        return Some("the cluster is being deleted or suspended".to_owned());
    }
    for (role, name) in [(Role::Prefill, "prefill worker"), (Role::Decode, "decode rank")] {
        let of_role = || view.members.iter().filter(move |member| member.role == role);
        if view.rebuilding.contains(&role) {
            // Requests are held until it serves again: better than no gateway that takes them.
            continue;
        }
        if of_role().next().is_none() {
            return Some(format!("there is no {name}"));
        }
        if !of_role().any(|member| member.serving) {
            return Some(format!("no {name} serves yet"));
        }
        if !of_role().any(|member| usable(member, reach)) {
            return Some(format!("no {name} is connected"));
        }
    }
    let epochs = |role| -> BTreeSet<&str> {
        let usable = view.members.iter().filter(|m| m.role == role && usable(m, reach));
        usable.map(|member| member.kv_epoch.as_str()).collect()
    };
    if view.rebuilding.is_empty() && epochs(Role::Prefill).is_disjoint(&epochs(Role::Decode)) {
        return Some("prefill and decode cannot read each other's KV (their kv epochs differ)".to_owned());
    }
    None
}

fn usable(member: &FleetMember, reach: &Reach) -> bool {
    member.serving && reach.counts(&member.name)
}

#[cfg(test)]
mod tests {
    use deepinfer_protocol::Generation;

    use super::*;

    fn member(name: &str, role: Role, serving: bool, kv_epoch: &str) -> FleetMember {
        FleetMember {
            name: name.into(),
            role,
            supernode: None,
            index: 0,
            first_rank: 0,
            ranks: 1,
            data: ([127, 0, 0, 1], 1).into(),
            control: ([127, 0, 0, 1], 2).into(),
            serving,
            kv_epoch: kv_epoch.to_owned(),
        }
    }

    fn reach(connected: &[&str]) -> Reach {
        let connected = connected.iter().map(|name| AgentId::from(*name)).collect();
        Reach { connected, ..Reach::default() }
    }

    fn reason(members: Vec<FleetMember>, connected: &[&str]) -> Option<String> {
        let view = FleetView { generation: Generation(1), members, ..FleetView::default() };
        unready_reason(&view, &reach(connected))
    }

    #[test]
    fn ready_needs_both_roles_serving_and_connected() {
        let p = || member("p", Role::Prefill, true, "e");
        let d = |serving| member("d", Role::Decode, serving, "e");
        assert_eq!(reason(vec![p(), d(true)], &["p", "d"]), None);
        let cases = [
            (vec![p()], vec!["p"], "there is no decode rank"),
            (vec![p(), d(false)], vec!["p", "d"], "no decode rank serves yet"),
            (vec![p(), d(true)], vec!["d"], "no prefill worker is connected"),
            (vec![], vec![], "there is no prefill worker"),
        ];
        for (members, connected, expected) in cases {
            assert_eq!(reason(members, &connected).as_deref(), Some(expected));
        }
        assert!(unready_reason(&FleetView::default(), &Reach::default()).is_some());
    }

    #[test]
    fn a_pool_that_is_rebuilt_leaves_the_gateway_ready_to_hold_requests() {
        let p = member("p", Role::Prefill, true, "e");
        let mut view = FleetView { generation: Generation(1), members: vec![p], ..FleetView::default() };
        let connected = reach(&["p"]);
        assert_eq!(unready_reason(&view, &connected).as_deref(), Some("there is no decode rank"));
        view.rebuilding = vec![Role::Decode];
        assert_eq!(unready_reason(&view, &connected), None);
        let cut_off = unready_reason(&view, &Reach::default());
        assert_eq!(cut_off.as_deref(), Some("no prefill worker is connected"), "the other pool still counts");
    }

    /// The control plane takes a minute to say that a node is lost; who holds requests meanwhile loses none.
    #[test]
    fn a_lost_pool_is_waited_for_a_while_but_not_by_a_gateway_that_has_lost_everybody() {
        let members = vec![member("p", Role::Prefill, true, "e"), member("d", Role::Decode, true, "e")];
        let view = FleetView { generation: Generation(1), members, ..FleetView::default() };
        let mut reach = reach(&["p", "d"]);
        let moment = Time(0) + Span::secs(5);
        reach.down(moment, &"d".into());
        assert_eq!(unready_reason(&view, &reach), None);
        let mut cut_off = reach.clone();
        cut_off.down(moment, &"p".into());
        assert_eq!(unready_reason(&view, &cut_off).as_deref(), Some("no prefill worker is connected"));
        assert!(!reach.expire(moment + Span::secs(119)));
        assert!(reach.expire(moment + Span::secs(120)));
        assert_eq!(unready_reason(&view, &reach).as_deref(), Some("no decode rank is connected"));
        // Who was never reached is not waited for, and who comes back counts from the next loss on.
        reach.down(moment, &"d".into());
        assert!(unready_reason(&view, &reach).is_some());
        reach.up(&"d".into());
        reach.down(moment + Span::secs(200), &"d".into());
        assert!(!reach.expire(moment + Span::secs(300)));
        assert_eq!(unready_reason(&view, &reach), None);
    }

    #[test]
    fn one_pair_of_the_same_kv_epoch_is_enough() {
        let members = |epoch| {
            vec![
                member("p1", Role::Prefill, true, "a"),
                member("p2", Role::Prefill, true, epoch),
                member("d", Role::Decode, true, "b"),
            ]
        };
        assert_eq!(reason(members("b"), &["p1", "p2", "d"]), None);
        assert!(reason(members("c"), &["p1", "p2", "d"]).is_some_and(|why| why.contains("kv epochs")));
    }

    #[test]
    fn members_that_drain_stay_connected() {
        let view =
            FleetView { members: vec![member("p", Role::Prefill, false, "e")], ..FleetView::default() };
        assert_eq!(peers(&view).len(), 1);
    }
}
