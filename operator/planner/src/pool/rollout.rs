//! Which supernodes are made and which leave: a function on numbers (operator.md 8.2, decisions.md: one at a time, the
//! new one before the old one).

/// A supernode as the budget sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub name: String,
    /// Of the revision that is wanted, and whole.
    pub current: bool,
    /// Why it leaves if it is not current.
    pub why: &'static str,
    /// Serves for long enough to count.
    pub available: bool,
    /// On its way out.
    pub draining: bool,
    /// Requests that run there.
    pub inflight: u32,
    /// Creation, in seconds since 1970.
    pub created: i64,
    /// Seconds for which it has waited for a place; `None` once it has one.
    pub unplaced: Option<i64>,
}

/// Why an old member leaves before the new one is made: there is no room for both.
pub(crate) const MAKING_ROOM: &str = "MakingRoom";
/// Why an old member leaves before the new one is placed: it waited too long.
pub(crate) const UNPLACEABLE: &str = "SurgeUnplaceable";

/// What to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moves {
    /// Supernodes to make.
    pub create: u32,
    /// Old ones whose place the made ones take, in the same order; shorter if some take nobody's.
    pub replaced: Vec<String>,
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
    /// There is a place for one more now.
    pub room: bool,
    /// How many of the wanted ones may be missing while there is no room for the new beside the old.
    pub max_unavailable: u32,
    /// Seconds that a new one may wait for a place beside the old ones.
    pub surge_timeout: i64,
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
    // More than wanted is made only where it can be placed now.
    let room = if budget.room { room } else { room.min(desired.saturating_sub(holding)) };
    if !budget.hold {
        moves.create = u32::try_from(missing.min(room)).unwrap_or(u32::MAX);
        let mut places: Vec<&Member> = serving.clone();
        places.sort_by_key(|m| (m.inflight, m.created, m.name.clone()));
        moves.replaced = places.iter().take(moves.create as usize).map(|m| m.name.clone()).collect();
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
    let mut count = spare.min(needless.max(at_once));
    // No place beside the old ones: one of them goes first, if so much may be missing.
    let stuck = current.iter().any(|m| m.unplaced.is_some_and(|seconds| seconds > budget.surge_timeout));
    let blocked = (missing > 0 && moves.create == 0 && !budget.room && !budget.hold) || stuck;
    let may_miss = available > desired.saturating_sub(budget.max_unavailable as usize);
    let first = count == 0 && blocked && may_miss && draining == 0 && desired > 0;
    if first {
        count = 1;
    }
    for member in leaving.iter().take(count) {
        let why = if desired == 0 {
            "ScaledDown"
        } else if first && stuck {
            UNPLACEABLE
        } else if first {
            MAKING_ROOM
        } else {
            member.why
        };
        moves.drain.push((member.name.clone(), why));
    }
    moves
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn member(name: &str, current: bool, available: bool) -> Member {
        Member {
            name: name.into(),
            current,
            why: "RollingOut",
            available,
            draining: false,
            inflight: 0,
            created: 0,
            unplaced: None,
        }
    }

    const ONE: Budget = Budget {
        desired: 1,
        surge: 1,
        paused: false,
        hold: false,
        room: true,
        max_unavailable: 1,
        surge_timeout: 600,
    };

    #[test]
    fn the_new_one_serves_before_the_old_one_goes() {
        let old = member("a", false, true);
        let made = Moves { create: 1, replaced: vec!["a".into()], ..Moves::default() };
        assert_eq!(moves(std::slice::from_ref(&old), ONE), made);
        let starting = member("b", true, false);
        assert_eq!(moves(&[old.clone(), starting], ONE), Moves::default());
        let both = [old, member("b", true, true)];
        assert_eq!(moves(&both, ONE), Moves { drain: vec![("a".into(), "RollingOut")], ..Moves::default() });
    }

    #[test]
    fn without_room_the_old_one_goes_first_if_so_much_may_be_missing() {
        let full = Budget { room: false, ..ONE };
        let old = [member("a", false, true)];
        let drain = vec![("a".into(), MAKING_ROOM)];
        assert_eq!(moves(&old, full), Moves { drain, ..Moves::default() });
        assert_eq!(moves(&old, Budget { max_unavailable: 0, ..full }), Moves::default());
        let two = [member("a", false, true), member("b", false, false)];
        let kept = moves(&two, Budget { desired: 2, max_unavailable: 0, ..full });
        assert!(kept.drain.is_empty(), "{kept:?}");
        assert_eq!(moves(&[], full).create, 1, "what is wanted waits for its place by itself");
    }

    #[test]
    fn a_new_one_that_finds_no_place_makes_the_old_one_go() {
        let waiting = |seconds| Member { unplaced: Some(seconds), ..member("b", true, false) };
        let both = |seconds| [member("a", false, true), waiting(seconds)];
        assert_eq!(moves(&both(600), ONE), Moves::default());
        assert_eq!(moves(&both(601), ONE).drain, [("a".to_owned(), UNPLACEABLE)]);
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
        let drain = vec![("b".into(), "ScaledDown")];
        let expected = Moves { delete: vec!["c".into()], drain, ..Moves::default() };
        assert_eq!(moves(&all, ONE), expected);
    }

    proptest! {
        #[test]
        fn what_serves_never_falls_below_what_is_wanted_and_a_change_comes_to_an_end(
            flags in prop::collection::vec((any::<bool>(), any::<bool>(), any::<bool>(), 0..5_u32), 0..6),
            desired in 0..4_u32,
            surge in 1..3_u32,
        ) {
            let budget = Budget { desired, surge, ..ONE };
            let mut members: Vec<Member> = flags.iter().enumerate().map(|(i, &(current, available, draining, inflight))| Member {
                draining, inflight, created: i as i64, ..member(&format!("m{i}"), current, available)
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
                    members.push(Member { created: next as i64, ..member(&format!("m{next}"), true, false) });
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
