//! Which supernodes are made and which leave: a function on numbers (operator.md 8.2, decisions.md: one at a time, the
//! new one before the old one).

/// A supernode as the budget sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub name: String,
    /// Of the revision that is wanted.
    pub current: bool,
    /// Serves for long enough to count.
    pub available: bool,
    /// On its way out.
    pub draining: bool,
    /// Requests that run there.
    pub inflight: u32,
    /// Creation, in seconds since 1970.
    pub created: i64,
}

/// What to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moves {
    /// Supernodes to make.
    pub create: u32,
    /// To delete at once: they serve nobody.
    pub delete: Vec<String>,
    /// To drain.
    pub drain: Vec<(String, &'static str)>,
}

/// How far a change may go at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Supernodes that are wanted.
    pub desired: u32,
    /// More than wanted, meanwhile.
    pub surge: u32,
    /// Nothing of another revision is made or drained.
    pub paused: bool,
    /// Nothing is made: failures come too fast.
    pub hold: bool,
}

/// Decides. Members that failed are not among `members`.
pub(crate) fn moves(members: &[Member], budget: Budget) -> Moves {
    let mut moves = Moves::default();
    let staying = |m: &&Member| !m.draining;
    let current: Vec<&Member> =
        members.iter().filter(staying).filter(|m| m.current || budget.paused).collect();
    let old: Vec<&Member> = members.iter().filter(staying).filter(|m| !m.current && !budget.paused).collect();
    let desired = budget.desired as usize;

    // Old ones that serve nobody cost nothing to lose.
    let (idle, serving): (Vec<&Member>, Vec<&Member>) = old.into_iter().partition(|m| !m.available);
    moves.delete.extend(idle.iter().map(|m| m.name.clone()));

    // New ones, as far as the surge allows. Draining ones hold their place until they are gone.
    let holding = members.len() - idle.len();
    let missing = desired.saturating_sub(current.len());
    let room = (desired + budget.surge as usize).saturating_sub(holding);
    // A replacement of the last one may always be made beside a draining one: nobody else serves.
    let room = if current.is_empty() && serving.is_empty() { room.max(1) } else { room };
    if !budget.hold {
        moves.create = u32::try_from(missing.min(room)).unwrap_or(u32::MAX);
    }

    // Too many of the wanted revision: those that serve nobody, then the least busy, then the youngest.
    let mut surplus = current.clone();
    surplus.sort_by_key(|m| (m.available, m.inflight, -m.created, m.name.clone()));
    for member in surplus.iter().take(current.len().saturating_sub(desired)) {
        if member.available {
            moves.drain.push((member.name.clone(), "ScaledDown"));
        } else {
            moves.delete.push(member.name.clone());
        }
    }

    // Old ones leave as new ones stand in for them.
    let available = current.iter().filter(|m| m.available).count().min(desired) + serving.len();
    let spare = available.saturating_sub(desired);
    let draining = members.iter().filter(|m| m.draining).count();
    let mut leaving: Vec<&Member> = serving;
    leaving.sort_by_key(|m| (m.inflight, m.created, m.name.clone()));
    // One at a time, except what the wanted number does not need at all.
    let needless = (leaving.len() + current.len()).saturating_sub(desired + budget.surge as usize);
    let at_once = if draining == 0 { 1 } else { 0 };
    let count = spare.min(needless.max(at_once));
    let why = if desired == 0 { "ScaledDown" } else { "RollingOut" };
    moves.drain.extend(leaving.iter().take(count).map(|m| (m.name.clone(), why)));
    moves
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn member(name: &str, current: bool, available: bool) -> Member {
        Member { name: name.into(), current, available, draining: false, inflight: 0, created: 0 }
    }

    const ONE: Budget = Budget { desired: 1, surge: 1, paused: false, hold: false };

    #[test]
    fn the_new_one_serves_before_the_old_one_goes() {
        let old = member("a", false, true);
        assert_eq!(moves(std::slice::from_ref(&old), ONE), Moves { create: 1, ..Moves::default() });
        let starting = member("b", true, false);
        assert_eq!(moves(&[old.clone(), starting], ONE), Moves::default());
        let both = [old, member("b", true, true)];
        assert_eq!(moves(&both, ONE), Moves { drain: vec![("a".into(), "RollingOut")], ..Moves::default() });
    }

    #[test]
    fn a_draining_one_counts_as_held_but_not_as_wanted() {
        let mut old = member("a", false, true);
        old.draining = true;
        assert_eq!(moves(&[old.clone(), member("b", true, true)], ONE), Moves::default());
        let mut other = member("c", true, true);
        other.draining = true;
        assert_eq!(moves(&[old, other], ONE).create, 1, "somebody must serve");
    }

    #[test]
    fn a_pause_leaves_the_old_revision_alone() {
        let paused = Budget { paused: true, ..ONE };
        assert_eq!(moves(&[member("a", false, true)], paused), Moves::default());
        assert_eq!(moves(&[], paused).create, 1, "a lost one is still replaced");
    }

    #[test]
    fn scaling_down_drains_the_least_busy_and_deletes_what_does_not_serve() {
        let mut busy = member("a", true, true);
        busy.inflight = 9;
        let all = [busy, member("b", true, true), member("c", true, false)];
        let expected = Moves { delete: vec!["c".into()], drain: vec![("b".into(), "ScaledDown")], create: 0 };
        assert_eq!(moves(&all, ONE), expected);
    }

    proptest! {
        #[test]
        fn what_serves_never_falls_below_what_is_wanted_and_a_change_comes_to_an_end(
            flags in prop::collection::vec((any::<bool>(), any::<bool>(), any::<bool>(), 0..5_u32), 0..6),
            desired in 0..4_u32,
            surge in 1..3_u32,
        ) {
            let budget = Budget { desired, surge, paused: false, hold: false };
            let mut members: Vec<Member> = flags.iter().enumerate().map(|(i, &(current, available, draining, inflight))| Member {
                name: format!("m{i}"), current, available, draining, inflight, created: i as i64,
            }).collect();
            let mut next = members.len();
            let serving = |members: &[Member]| members.iter().filter(|m| m.available && !m.draining).count();
            let mut quiet = 0;
            for _ in 0..60 {
                let before = serving(&members);
                let step = moves(&members, budget);
                prop_assert_eq!(&step, &moves(&members, budget));
                members.retain(|m| !step.delete.contains(&m.name));
                for (name, _) in &step.drain {
                    members.iter_mut().find(|m| m.name == *name).expect("a member").draining = true;
                }
                prop_assert!(serving(&members) >= before.min(desired as usize), "{step:?}");
                if step == Moves::default() { quiet += 1; }
                // The world moves on: drained ones go, new ones come and become available.
                members.retain(|m| !m.draining);
                members.iter_mut().for_each(|m| m.available = true);
                for _ in 0..step.create {
                    members.push(Member { name: format!("m{next}"), current: true, available: false, draining: false, inflight: 0, created: next as i64 });
                    next += 1;
                }
                let held = members.len();
                prop_assert!(step.create == 0 || held <= (desired + surge) as usize + 1, "{held} held");
            }
            prop_assert!(quiet > 20, "it settles");
            prop_assert_eq!(members.iter().filter(|m| m.current).count(), desired as usize);
            prop_assert!(members.iter().all(|m| m.current));
        }
    }
}
