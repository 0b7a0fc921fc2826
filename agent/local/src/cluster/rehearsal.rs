//! Plans and executes in memory until nothing is left to do, to see what would happen.
//!
//! Invariant: the world that is given is not changed, and no pod runs.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use deepinfer_planner::{Key, Kind, Object, Report, Target, World, check, describe, plan};

use super::pod_args::{self, Extras};
use super::target::ModelSizes;

/// Plans in a row after which a world is said not to settle; a first start takes about six.
const MAX_ROUNDS: usize = 50;

/// What would happen.
#[derive(Debug)]
pub struct Rehearsal {
    /// The world after it, as far as it comes without agents that answer.
    pub world: World,
    /// What is made, changed and removed, for people. Empty if nothing.
    pub text: String,
    /// Of the last plan.
    pub report: Report,
    /// Why it cannot be done: flags that do not fit, or a plan that breaks a rule.
    pub problems: Vec<String>,
}

/// Rehearses.
pub fn rehearse(world: &World, target: &Target, extras: &Extras, sizes: Option<&ModelSizes>) -> Rehearsal {
    let before = pods(world);
    let mut play = Rehearsal {
        world: world.clone(),
        text: String::new(),
        report: Report::default(),
        problems: Vec::new(),
    };
    for _ in 0..MAX_ROUNDS {
        let plan = plan(&play.world, target);
        play.problems = check(&play.world, &plan).iter().map(ToString::to_string).collect();
        if !play.problems.is_empty() {
            return play;
        }
        play.text += &changes(&describe(&play.world, &plan));
        play.report = plan.report;
        let known = (pods(&play.world), leaving(&play.world));
        play.world.blueprint = Some(plan.blueprint);
        for action in &plan.actions {
            if let Err(conflict) = play.world.apply(action) {
                play.problems.push(format!("{action}: {conflict}"));
                return play;
            }
        }
        play.world.settle();
        let moved = follow_deployments(&mut play, &known);
        if plan.actions.is_empty() && !moved {
            break;
        }
    }
    play.problems = flags(&play.world, &before, extras, sizes);
    play
}

/// Tells what Deployments did; whether they did anything.
fn follow_deployments(play: &mut Rehearsal, known: &(BTreeSet<String>, BTreeSet<String>)) -> bool {
    let mut moved = false;
    for object in play.world.of(Kind::Pod) {
        let name = object.name();
        let owner = object.meta().owner_references.as_ref().and_then(|owners| owners.first());
        if owner.is_none_or(|owner| owner.kind != "Deployment") {
            continue;
        }
        let line = if !known.0.contains(name) {
            format!("+ Pod/{name}")
        } else if object.is_deleted() && !known.1.contains(name) {
            format!("- Pod/{name}")
        } else {
            continue;
        };
        moved = true;
        let _ = writeln!(play.text, "{line}");
    }
    moved
}

fn pods(world: &World) -> BTreeSet<String> {
    world.of(Kind::Pod).map(|object| object.name().to_owned()).collect()
}

fn leaving(world: &World) -> BTreeSet<String> {
    world.of(Kind::Pod).filter(|object| object.is_deleted()).map(|object| object.name().to_owned()).collect()
}

/// Without the lines about statuses and events.
fn changes(text: &str) -> String {
    let aside = |line: &str| line.starts_with("  ") && !line.starts_with("    ");
    text.lines().filter(|line| !aside(line)).fold(String::new(), |text, line| text + line + "\n")
}

/// Flags of new pods that do not fit, each once.
fn flags(
    world: &World,
    before: &BTreeSet<String>,
    extras: &Extras,
    sizes: Option<&ModelSizes>,
) -> Vec<String> {
    let mut problems = BTreeSet::new();
    for name in pods(world).difference(before) {
        if let Some(Object::Pod(pod)) = world.objects.get(&Key::new(Kind::Pod, name))
            && let Err(problem) = pod_args::check(pod, extras, sizes)
        {
            problems.insert(problem);
        }
    }
    problems.into_iter().collect()
}
