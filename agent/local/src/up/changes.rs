//! A file that the user applies to a running cluster: the checks that an API server makes, then what would change.

use std::path::PathBuf;

use deepinfer_planner::{ModelState, Target, World};

use crate::cluster::file::ClusterFile;
use crate::cluster::plan::notes;
use crate::cluster::pod_args::{self, Extras};
use crate::cluster::rehearsal::{Rehearsal, rehearse};
use crate::cluster::target::{LocalModel, ModelSizes};

/// An applied file.
#[derive(Debug)]
pub struct Applied {
    /// The world with the user's new object.
    pub world: World,
    /// What the planner is told from now on.
    pub target: Target,
    /// What changes, for people.
    pub text: String,
}

/// Checks a file against the running cluster. Reads the model's headers: not for async threads.
///
/// # Errors
/// Everything that is wrong, for people.
pub fn apply(
    world: &World,
    target: &Target,
    extras: &Extras,
    (yaml, file, base): (String, String, PathBuf),
) -> Result<Applied, String> {
    let file = ClusterFile { name: file, bytes: yaml.into_bytes(), base };
    let manifest = file.parse()?;
    let running = world.cluster().ok_or("no cluster runs here")?;
    if manifest.cluster.metadata.name != running.metadata.name {
        let name =
            |cluster: &deepinfer_crds::DeepInferCluster| cluster.metadata.name.clone().unwrap_or_default();
        let (asked, here) = (name(&manifest.cluster), name(running));
        return Err(format!(
            "metadata.name is {asked}, this process runs {here}: start the other with `deepinfer up`"
        ));
    }
    let broken = manifest.check_update(running);
    if !broken.is_empty() {
        return Err(file.lines(&broken));
    }
    let model = LocalModel::look(&manifest.cluster, &file.base);
    if let ModelState::Failed { message, .. } = &model.state {
        return Err(message.clone());
    }
    let mut target = target.clone();
    if let Target::Local(local) = &mut target {
        local.model_path = model.path.to_string_lossy().into_owned();
    }
    let mut world = world.clone();
    world.model = model.state;
    world.user_applies(manifest.cluster);
    let play = rehearse(&world, &target, extras, model.sizes.as_ref());
    refused(&play)?;
    let mut text = play.text.clone();
    if text.is_empty() {
        text.push_str("nothing changes\n");
    }
    text += &notes(&play.report);
    Ok(Applied { world, target, text })
}

/// What stands against a rehearsed plan.
///
/// # Errors
/// All of it, a line each.
pub fn refused(play: &Rehearsal) -> Result<(), String> {
    let refused = play.report.refused.iter().map(ToString::to_string);
    let lines: Vec<String> = refused.chain(play.problems.iter().cloned()).collect();
    if lines.is_empty() { Ok(()) } else { Err(lines.join("\n")) }
}

/// Flags of the gateway that follow from the agents: the longest sequence that all of them take.
pub fn gateway_flags(play: &Rehearsal, extras: &Extras, sizes: Option<&ModelSizes>) -> Vec<String> {
    let limit = pod_args::context_limit(play.world.pods(), extras, sizes);
    limit.map(|limit| format!("--context-limit={limit}")).into_iter().collect()
}
