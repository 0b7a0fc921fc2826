//! `why`: what is in the way of a cluster or a supernode, and what would help.
//! Invariant: an explanation is a value; its text is a pure function of it.

mod cluster;
mod pods;
mod remedy;
mod supernode;
mod text;

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use serde::Serialize;

use crate::args::WhyArgs;
use crate::client::Session;
use crate::events::{self, Happening};
use crate::output::{self, Outcome};
use crate::view::{self, View, name_of};

pub use pods::PodTrouble;

/// Events at the end of an explanation.
const EVENTS_MAX: usize = 8;

/// Why something is as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Explanation {
    /// Kind and name.
    pub object: String,
    /// The state in one sentence.
    pub headline: String,
    /// Whether something is in the way.
    pub problem: bool,
    /// What is in the way, the most important first.
    pub causes: Vec<Cause>,
    /// Domains that were looked at, the best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub candidates: Vec<deepinfer_crds::supernode::DomainCandidate>,
    /// Pods that are not ready.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<PodTrouble>,
    /// What would help, each once.
    pub help: Vec<String>,
    /// Explanations of parts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Explanation>,
    /// The last events.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<Happening>,
}

/// One thing in the way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cause {
    /// One word.
    pub reason: String,
    /// For people.
    pub message: String,
}

impl Explanation {
    /// Adds a cause with what would help against it.
    fn cause(&mut self, reason: &str, message: impl Into<String>) {
        let cause = Cause { reason: reason.to_owned(), message: message.into() };
        if !self.causes.contains(&cause) {
            self.causes.push(cause);
        }
        self.help_against(reason);
    }

    fn help_against(&mut self, reason: &str) {
        if let Some(remedy) = remedy::of(reason) {
            self.help(format!("{reason}: {remedy}"));
        }
    }

    fn help(&mut self, text: String) {
        if !self.help.contains(&text) {
            self.help.push(text);
        }
    }
}

/// Explains.
///
/// # Errors
/// If there is no such object, or the API server cannot be asked.
pub async fn run(session: &Session, args: &WhyArgs) -> Result<Outcome> {
    let clusters = view::clusters(session).await?;
    if clusters.is_empty() && args.name.is_none() {
        bail!("{}", view::none(&session.namespace));
    }
    let mut explanations = Vec::new();
    match &args.name {
        None => {
            for cluster in clusters {
                let view = view::gather(session, cluster).await?;
                explanations.push(of_cluster(session, &view).await);
            }
        }
        Some(name) => match clusters.iter().find(|c| name_of(&c.metadata) == name) {
            Some(cluster) => {
                let view = view::gather(session, cluster.clone()).await?;
                explanations.push(of_cluster(session, &view).await);
            }
            None => explanations.push(of_supernode(session, name, &clusters).await?),
        },
    }
    if args.output.is_some() {
        output::json(&explanations)?;
    } else {
        let pages: Vec<String> = explanations.iter().map(|e| text::text(e, crate::client::now())).collect();
        output::print(&pages.join("\n"))?;
    }
    Ok(Outcome::problem_if(explanations.iter().any(|e| e.problem)))
}

/// The text about a cluster without its events, for archives.
pub fn page(view: &View) -> String {
    text::text(&cluster::explain(view), view.now)
}

/// Whether nothing is wrong with a pod.
pub fn is_well(pod: &k8s_openapi::api::core::v1::Pod) -> bool {
    pods::trouble(pod).is_none()
}

async fn of_cluster(session: &Session, view: &View) -> Explanation {
    let mut explanation = cluster::explain(view);
    explanation.events = happenings(session, view, None).await;
    explanation
}

async fn of_supernode(
    session: &Session,
    name: &str,
    clusters: &[deepinfer_crds::DeepInferCluster],
) -> Result<Explanation> {
    let api = session.api::<deepinfer_crds::Supernode>();
    let found =
        api.get_opt(name).await.map_err(|e| session.explain(e, &format!("cannot read Supernode {name}")))?;
    let Some(found) = found else {
        let known: Vec<&str> = clusters.iter().map(|c| name_of(&c.metadata)).collect();
        bail!("{}", view::missing("Supernode or DeepInferCluster", name, &session.namespace, &known));
    };
    let Some(cluster) = clusters.iter().find(|c| name_of(&c.metadata) == found.spec.cluster_name) else {
        bail!(
            "Supernode {name} belongs to DeepInferCluster {}, which is gone: kubectl deepinfer release {} lets it go",
            found.spec.cluster_name,
            found.spec.cluster_name
        );
    };
    let view = view::gather(session, cluster.clone()).await?;
    let mut explanation = supernode::explain(&view, &found);
    explanation.events = happenings(session, &view, Some(name)).await;
    Ok(explanation)
}

/// The last warnings about a cluster or one of its supernodes. Events are an aside: without the right to read them
/// the rest is still worth showing.
async fn happenings(session: &Session, view: &View, supernode: Option<&str>) -> Vec<Happening> {
    let mut names = BTreeSet::new();
    match supernode {
        Some(name) => {
            names.insert(name.to_owned());
            names.extend(view.pods_of(name).map(|p| name_of(&p.metadata).to_owned()));
        }
        None => {
            names.insert(name_of(&view.cluster.metadata).to_owned());
            names.extend(view.pools.iter().map(|p| name_of(&p.metadata).to_owned()));
            names.extend(view.supernodes.iter().map(|s| name_of(&s.metadata).to_owned()));
        }
    }
    let mut events = events::about(session, &names).await.unwrap_or_default();
    events.retain(|event| event.warning);
    events.split_off(events.len().saturating_sub(EVENTS_MAX))
}
