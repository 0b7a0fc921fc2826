//! What the gateway reads out of a FleetView: whom to connect to, and whether requests would be served.
//!
//! Pure: functions of the view and the set of open connections.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use deepinfer_protocol::AgentId;
use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::{FleetMember, FleetView};

/// Agents to keep a connection to: all of them, for those that serve no more still run what they have.
pub fn peers(view: &FleetView) -> Vec<(AgentId, SocketAddr)> {
    view.members.iter().map(|member| (member.name.clone(), member.data)).collect()
}

/// Why a request would not be served now; `None` if it would. Prefill and decode must be able to read each other's
/// KV.
pub fn unready_reason(view: &FleetView, connected: &BTreeSet<AgentId>) -> Option<String> {
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
        if !of_role().any(|member| usable(member, connected)) {
            return Some(format!("no {name} is connected"));
        }
    }
    let epochs = |role| -> BTreeSet<&str> {
        let usable = view.members.iter().filter(|m| m.role == role && usable(m, connected));
        usable.map(|member| member.kv_epoch.as_str()).collect()
    };
    if view.rebuilding.is_empty() && epochs(Role::Prefill).is_disjoint(&epochs(Role::Decode)) {
        return Some("prefill and decode cannot read each other's KV (their kv epochs differ)".to_owned());
    }
    None
}

fn usable(member: &FleetMember, connected: &BTreeSet<AgentId>) -> bool {
    member.serving && connected.contains(&member.name)
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

    fn reason(members: Vec<FleetMember>, connected: &[&str]) -> Option<String> {
        let view = FleetView { generation: Generation(1), members, ..FleetView::default() };
        unready_reason(&view, &connected.iter().map(|name| AgentId::from(*name)).collect())
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
        assert!(unready_reason(&FleetView::default(), &BTreeSet::new()).is_some());
    }

    #[test]
    fn a_pool_that_is_rebuilt_leaves_the_gateway_ready_to_hold_requests() {
        let p = member("p", Role::Prefill, true, "e");
        let mut view = FleetView { generation: Generation(1), members: vec![p], ..FleetView::default() };
        let connected = BTreeSet::from([AgentId::from("p")]);
        assert_eq!(unready_reason(&view, &connected).as_deref(), Some("there is no decode rank"));
        view.rebuilding = vec![Role::Decode];
        assert_eq!(unready_reason(&view, &connected), None);
        let cut_off = unready_reason(&view, &BTreeSet::new());
        assert_eq!(cut_off.as_deref(), Some("no prefill worker is connected"), "the other pool still counts");
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
