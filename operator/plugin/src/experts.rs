//! `experts show`: the plan of each supernode, its balance and its hottest experts, from the status of its
//! ExpertPlacement.

use std::fmt::Write as _;

use anyhow::{Result, bail};
use deepinfer_crds::ExpertPlacement;
use kube::api::ListParams;

use crate::args::ExpertsArgs;
use crate::client::Session;
use crate::output::{self, Outcome};
use crate::view::{missing, name_of};
use deepinfer_crds::table::{columns, or_dash};

/// Shows the experts.
///
/// # Errors
/// If there is no such supernode, or the API server cannot be asked.
pub async fn run(session: &Session, args: &ExpertsArgs) -> Result<Outcome> {
    let mut all: Vec<ExpertPlacement> =
        session.list(&session.api(), ListParams::default(), "ExpertPlacements").await?;
    all.sort_by_key(|p| p.metadata.name.clone());
    if let Some(wanted) = &args.supernode {
        let known: Vec<String> = all.iter().map(|p| p.spec.supernode_name.clone()).collect();
        all.retain(|p| p.spec.supernode_name == *wanted);
        if all.is_empty() {
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            bail!("{}", missing("ExpertPlacement of Supernode", wanted, &session.namespace, &known));
        }
    }
    if args.output.is_some() {
        output::json(&all)?;
    } else {
        output::print(&text(&all, &session.namespace))?;
    }
    Ok(Outcome::Good)
}

/// The table, and the hottest experts of each supernode.
pub fn text(all: &[ExpertPlacement], namespace: &str) -> String {
    if all.is_empty() {
        return format!(
            "no ExpertPlacement in namespace {namespace}: supernodes use the uniform layout, and this release does not \
             move experts yet\n"
        );
    }
    let row = |p: &ExpertPlacement| {
        let status = p.status.clone().unwrap_or_default();
        let applied = status.applied.as_ref();
        let imbalance = status.imbalance.clone().unwrap_or_default();
        vec![
            p.spec.supernode_name.clone(),
            format!("{:?}", p.spec.mode),
            applied.map_or_else(|| "-".to_owned(), |a| a.generation.to_string()),
            applied.map_or_else(|| "uniform".to_owned(), |a| short(&a.hash)),
            applied.map_or_else(|| "-".to_owned(), |a| format!("{:?}", a.state)),
            or_dash(applied.and_then(|a| a.layers_flipped.as_deref())),
            or_dash(imbalance.current.as_deref()),
            or_dash(imbalance.planned.as_deref()),
            imbalance.worst_layer.map_or_else(|| "-".to_owned(), |l| l.to_string()),
        ]
    };
    let head =
        ["SUPERNODE", "MODE", "PLAN", "HASH", "STATE", "LAYERS", "IMBALANCE", "PLANNED", "WORST LAYER"];
    let mut text = columns(&head, &all.iter().map(row).collect::<Vec<_>>());
    for placement in all {
        details(placement, &mut text);
    }
    text
}

fn details(placement: &ExpertPlacement, text: &mut String) {
    let name = name_of(&placement.metadata);
    let Some(status) = &placement.status else {
        let _ = writeln!(text, "\n{name} has no status yet: no load has been reported");
        return;
    };
    let shape = &placement.spec.shape;
    let extra = (shape.slots_per_rank * shape.ranks).saturating_sub(shape.experts);
    let _ = writeln!(
        text,
        "\n{name}: {} layers x {} experts on {} ranks x {} slots ({extra} extra)",
        shape.layers, shape.experts, shape.ranks, shape.slots_per_rank
    );
    if !status.hot.is_empty() {
        let _ = writeln!(text, "hottest (layer/expert, share of the layer):");
        for hot in &status.hot {
            let _ = writeln!(text, "  {}/{}  {}", hot.layer, hot.expert, hot.share);
        }
    }
    for c in status.conditions.iter().filter(|c| c.status != "True") {
        let _ = writeln!(text, "{} is {}: {}: {}", c.type_, c.status, c.reason, c.message);
    }
    if let Some(advice) = &status.recommendation {
        let _ = writeln!(text, "no plan balances this load; what would help: {advice}");
    }
}

/// A hash as far as people compare it.
fn short(hash: &str) -> String {
    hash.trim_start_matches("sha256:").chars().take(12).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_placement_is_shown_with_its_hottest_experts() {
        let placement = json!({
            "apiVersion": "deepinfer.io/v1alpha1", "kind": "ExpertPlacement",
            "metadata": {"name": "v41-decode-bcdfg"},
            "spec": {
                "clusterName": "v41", "poolName": "v41-decode", "supernodeName": "v41-decode-bcdfg", "mode": "Auto",
                "shape": {"layers": 40, "experts": 384, "slotsPerRank": 7, "ranks": 64},
            },
            "status": {
                "imbalance": {"current": "1.31", "planned": "1.06", "worstLayer": 7},
                "hot": [{"layer": 7, "expert": 12, "share": "0.08"}],
                "applied": {"hash": "sha256:0123456789abcdef", "generation": 3, "state": "Staging", "layersFlipped": "12/40"},
                "conditions": [{"type": "Balanced", "status": "False", "reason": "Imbalanced", "message": "1.31 > 1.10",
                    "lastTransitionTime": "2026-05-01T10:00:00Z"}],
            },
        });
        let placement: ExpertPlacement = serde_json::from_value(placement).expect("a placement");
        let text = text(&[placement], "serving");
        let wanted = "\
SUPERNODE          MODE   PLAN   HASH           STATE     LAYERS   IMBALANCE   PLANNED   WORST LAYER
v41-decode-bcdfg   Auto   3      0123456789ab   Staging   12/40    1.31        1.06      7

v41-decode-bcdfg: 40 layers x 384 experts on 64 ranks x 7 slots (64 extra)
hottest (layer/expert, share of the layer):
  7/12  0.08
Balanced is False: Imbalanced: 1.31 > 1.10
";
        assert_eq!(text, wanted);
    }
}
